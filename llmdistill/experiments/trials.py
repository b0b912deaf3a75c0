"""The trials of a study: each is a run of the main job in a folder of its own, found again when it is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmdistill.artifacts import read_record
from llmdistill.config import RunConfig
from llmdistill.config.command_line import config_from_dict, set_value, to_dict
from llmdistill.errors import UserError
from llmdistill.files import write_json, write_text
from llmdistill.fingerprints import digest
from llmdistill.methods import METHODS
from llmdistill.run.artifacts import finished_metrics, input_fingerprints, shaping_settings
from llmdistill.runtime.ds_config import read_ds_config


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    title: str
    """The trial in a few words."""
    settings: Mapping[str, Any]
    """What sets it apart from the others but its seed: the grid's values, by dotted key; empty without a grid."""
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)

    @property
    def recipe(self) -> Path:
        """Where its whole configuration stands."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def log(self) -> Path:
        """What the run printed."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def metrics(self) -> dict[str, Any] | None:
        """What the finished run left, or None where it is not finished or lacks scores that this trial asks for.

        Raises:
            UserError: the folder holds a run of another configuration.
        """
        return finished_metrics(self.config)

    def write_recipe(self) -> Path:
        """Write the recipe that the main job reads."""
        write_text(self.recipe, yaml.safe_dump(to_dict(self.config), sort_keys=False, allow_unicode=True))
        return self.recipe

    def seconds(self) -> float | None:
        """How long the trial took over all its starts, scoring included; None where it is not known."""
        record = read_record(self.folder / "seconds.json", remedy="remove the file")
        return None if record is None else float(record["seconds"])

    def add_seconds(self, seconds: float) -> None:
        """Keep how long one more start of the trial took."""
        write_json(self.folder / "seconds.json", {"seconds": seconds + (self.seconds() or 0.0)})


@dataclass(frozen=True)
class Result:
    """A trial that has been run."""

    trial: Trial
    metrics: dict[str, Any] | None
    """None where it failed."""
    error: str | None = None
    """Why it failed, in one sentence."""
    seconds: float | None = None
    """How long it took over all its starts, where that is known."""


def kept_result(trial: Trial) -> Result | None:
    """The result of a trial that is finished already, or whose folder belongs to another run; None for any other."""
    try:
        metrics = trial.metrics()
    except UserError as error:
        return Result(trial, None, str(error))
    return None if metrics is None else Result(trial, metrics, None, trial.seconds())


def ended_result(trial: Trial, error: str | None, seconds: float) -> Result:
    """The result of a trial that has just been run.

    Args:
        trial: the trial.
        error: why it failed, None where it did not.
        seconds: how long it took.
    """
    if error is not None:
        return Result(trial, None, error)
    result = kept_result(trial)
    if result is None:
        return Result(trial, None, f"it ended without its scores; see {trial.log}")
    if result.metrics is None:
        return result
    trial.add_seconds(seconds)
    return Result(trial, result.metrics, None, trial.seconds())


class Progress:
    """Says which trial is running, how it ended, and how far the study is."""

    def __init__(self, total: int, describe: Callable[[Mapping[str, Any]], str]) -> None:
        self._total, self._describe, self._seen = total, describe, 0
        self._running: dict[Path, str] = {}

    def start(self, trial: Trial) -> None:
        """Say that a trial starts."""
        self._running[trial.folder] = self._next(trial)
        print(f"{self._running[trial.folder]} ...", flush=True)

    def end(self, result: Result, *, kept: bool = False) -> None:
        """Say how a trial ended; `kept`: it was finished before."""
        said = f"FAILED: {result.error}" if result.metrics is None else self._describe(result.metrics)
        head = self._running.pop(result.trial.folder, None) or self._next(result.trial)
        print(f"{head}: {said}{' (kept)' if kept else ''}", flush=True)

    def _next(self, trial: Trial) -> str:
        self._seen += 1
        return f"[{self._seen}/{self._total}] {trial.title}"


def make_trial(
    root: Path,
    base: RunConfig,
    name: str,
    changes: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    title: str | None = None,
) -> Trial:
    """The trial of a recipe with some settings changed.

    Its folder's name ends with a digest of all that shapes the student, so a changed recipe makes new trials.

    Args:
        root: the study's folder.
        base: the recipe.
        name: beginning of the folder's name.
        changes: values by dotted key, the seed perhaps among them.
        settings: the grid's values, by dotted key; they count as changes, and stand in the title and the name.
        title: beginning of the title, without it the name.
    """
    settings = settings or {}
    values = to_dict(base)
    for key, value in {**changes, **settings}.items():
        set_value(values, key, value)
    shaping = shaping_settings(values)
    # The trial of another micro batch is the same one. Inputs that the study makes itself are known by their folders.
    # Another validation set means other curves.
    del shaping["train"]["micro_batch_size"]
    identity = {
        **shaping,
        "inputs": input_fingerprints(values, made_below=root),
        "ds_config": {**read_ds_config(values["ds_config"]), "tensorboard": None},
        "valid": values["data"]["valid"],
    }
    folder = "-".join([name, *_pairs(settings, ""), f"seed{values['seed']}", digest(identity)[:8]])
    values["output_dir"] = str(root / "trials" / folder)
    shown = " ".join([name if title is None else title, *_pairs(settings, "="), f"seed={values['seed']}"])
    return Trial(shown, settings, values["seed"], config_from_dict(values, METHODS))


def _pairs(settings: Mapping[str, Any], sign: str) -> list[str]:
    """The values under the last part of their keys."""
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
    return [f"{key.rsplit('.', 1)[-1]}{sign}{text}" for key, text in texts.items()]
