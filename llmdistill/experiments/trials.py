"""The trials of a comparison: each is a run of the main job in a folder of its own, found again when it is finished."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmdistill.config import RunConfig
from llmdistill.config.command_line import config_from_dict, scores_asked, to_dict
from llmdistill.experiments.launcher import Launcher
from llmdistill.experiments.variants import Variant
from llmdistill.files import write_json, write_text
from llmdistill.run.artifacts import shaping_settings


@dataclass(frozen=True)
class Trial:
    """One run: a variant at one point of its grid, with one seed."""

    variant: Variant
    point: Mapping[str, Any]
    """The grid's values, by dotted key; empty for the one that trains nothing."""
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

    @property
    def title(self) -> str:
        """The trial in a few words."""
        return " ".join([self.variant.label, *_pairs(self.point, "="), f"seed={self.seed}"])

    def metrics(self) -> dict[str, Any] | None:
        """What the finished run left, or None where it is not finished or lacks scores that this trial asks for."""
        file = self.folder / "metrics.json"
        if not file.is_file():
            return None
        metrics = dict(json.loads(file.read_text(encoding="utf-8")))
        old, new = metrics["asked"], scores_asked(self.config)
        # A trial that became a final run has the test sets' scores too; it stays finished as a trial.
        has_all = old["tests"].items() >= new["tests"].items()
        return metrics if has_all and {**old, "tests": None} == {**new, "tests": None} else None


def make_trial(
    root: Path, base: RunConfig, variant: Variant, point: Mapping[str, Any], seed: int, **more: Any
) -> Trial:
    """The trial of a variant: the recipe's settings, the variant's, the grid point's, and `more` by dotted key.

    Its folder's name holds a digest of all that shapes the student, so a changed recipe makes new trials.
    """
    values = to_dict(base)
    overrides = {**variant.settings, **point, **{key.replace("__", "."): value for key, value in more.items()}}
    for key, value in {**overrides, "seed": seed}.items():
        set_value(values, key, value)
    # The engine's settings count by their file here, and another validation set means other curves.
    identity = {**shaping_settings(values), "ds_config": values["ds_config"], "valid": values["data"]["valid"]}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    name = "-".join([variant.name, *_pairs(point, ""), f"seed{seed}", digest])
    values["output_dir"] = str(root / "trials" / name)
    return Trial(variant, point, seed, config_from_dict(values))


def _pairs(point: Mapping[str, Any], sign: str) -> list[str]:
    """The point's values under the last part of their keys."""
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in point.items()}
    return [f"{key.rsplit('.', 1)[-1]}{sign}{text}" for key, text in texts.items()]


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a nested value by its dotted key."""
    *parents, name = key.split(".")
    for parent in parents:
        values = values[parent]
    assert name in values, f"{key} is no setting"
    values[name] = value


@dataclass(frozen=True)
class Result:
    """A trial that has been run."""

    trial: Trial
    metrics: dict[str, Any] | None
    """None where it failed."""
    error: str | None = None

    @property
    def valid(self) -> dict[str, Any] | None:
        """The student's scores on the validation set."""
        return None if self.metrics is None else self.metrics["student"].get("valid")


def run_trial(trial: Trial, launcher: Launcher) -> Result:
    """Run a trial to its end unless it is finished already; a failure is a result too."""
    metrics = trial.metrics()
    if metrics is not None:
        return Result(trial, metrics)
    write_text(trial.recipe, yaml.safe_dump(to_dict(trial.config), sort_keys=False, allow_unicode=True))
    began = time.perf_counter()
    error = launcher.run(launcher.train_command(trial.recipe), trial.log)
    if error is not None:
        return Result(trial, None, error)
    metrics = trial.metrics()
    if metrics is None:
        return Result(trial, None, f"it ended without its scores; see {trial.log}")
    _add_seconds(trial, time.perf_counter() - began)
    return Result(trial, metrics)


def _add_seconds(trial: Trial, seconds: float) -> None:
    """Keep how long a trial took, over all its starts."""
    write_json(trial.folder / "seconds.json", {"seconds": seconds + (seconds_of(trial) or 0.0)})


def seconds_of(trial: Trial) -> float | None:
    """How long a trial took, start and scoring included; None where it is not known."""
    file = trial.folder / "seconds.json"
    return float(json.loads(file.read_text(encoding="utf-8"))["seconds"]) if file.is_file() else None
