"""The trials of a study, each a training run in its own folder that is not repeated, and the choice among settings."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from llmdistill.artifacts import read_record
from llmdistill.config import RunConfig
from llmdistill.config.command_line import build, set_value, to_dict
from llmdistill.errors import UserError
from llmdistill.files import write_json, write_text
from llmdistill.fingerprints import digest
from llmdistill.messages import say
from llmdistill.methods import METHODS
from llmdistill.progress import Activity
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.training.run_folder import finished_metrics, input_fingerprints, shaping_ds_config, shaping_settings


@dataclass(frozen=True)
class Trial:
    """One run in a folder of its own, which is not repeated if it is finished.

    Subclasses are work of another kind that ends with scores: other settings, other files and another command.
    """

    title: str
    settings: Mapping[str, Any]
    """The grid's values that define this trial together with its seed, by dotted key; empty without a grid."""
    seed: int
    config: Any
    """The settings of the work; of a run its RunConfig."""
    work: ClassVar[str | None] = None
    """The key in the table of `commands/worker.py` for work that is no run of `train.py`."""

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def recipe(self) -> Path:
        """The file with the trial's whole configuration."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def log(self) -> Path:
        """The file with the output of the run."""
        return self.recipe.with_suffix(".log")

    def read_scores(self) -> dict[str, Any] | None:
        """Return the scores of an earlier process; None if some are missing, UserError if the folder is another's."""
        return finished_metrics(self.config)

    def read_new_scores(self) -> dict[str, Any] | None:
        """Return the scores of the process that has just ended, None if it left none."""
        return self.read_scores()

    @property
    def has_launchers(self) -> bool:
        """Whether its process needs no launcher, because what it runs has launchers of its own."""
        return False

    @property
    def entry(self) -> list[str]:
        """The module of the trial's own process, and its arguments."""
        file = str(self.recipe)
        return ["llmdistill.train", "--recipe", file] if self.work is None else ["llmdistill.commands.worker", file]

    def values(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return to_dict(self.config)

    def write(self) -> None:
        """Write the file that the trial's own process reads."""
        values = self.values()
        text = values if self.work is None else {"work": self.work, "settings": values}
        write_text(self.recipe, yaml.safe_dump(text, sort_keys=False, allow_unicode=True))

    def seconds(self) -> float | None:
        """Return the total duration of the trial over all its starts, including the scoring; None if it is unknown."""
        record = read_record(self.folder / "seconds.json", remedy="remove the file", keys={"seconds": float})
        return None if record is None else float(record["seconds"])

    def add_seconds(self, seconds: float) -> float:
        """Keep the duration of a start that has just ended, and return that of all starts."""
        total = seconds + (self.seconds() or 0.0)
        write_json(self.folder / "seconds.json", {"seconds": total})
        return total


@dataclass(frozen=True)
class Result:
    trial: Trial
    metrics: dict[str, Any] | None
    error: str | None = None
    seconds: float | None = None
    """As `Trial.seconds`."""


def finished_result(trial: Trial) -> Result | None:
    """Return the result of a finished trial, an error if its folder belongs to another run, else None."""
    try:
        metrics = trial.read_scores()
    except UserError as error:
        return Result(trial, None, str(error))
    return None if metrics is None else Result(trial, metrics, None, trial.seconds())


def ended_result(trial: Trial, error: str | None, seconds: float) -> Result:
    """Return the result of a trial that has just ended, after a start of some seconds; `error`: why it failed."""
    if error is not None:
        return Result(trial, None, error)
    try:
        metrics = trial.read_new_scores()
    except UserError as damage:
        return Result(trial, None, str(damage))
    if metrics is None:
        return Result(trial, None, f"it ended without its scores; see {trial.log}")
    return Result(trial, metrics, None, trial.add_seconds(seconds))


class Progress:
    """Prints which trial is running, how it ended, and the progress of the study; without a total it prints nothing.

    In a `with` block the study is an Activity, whose detail is the last line of the running trial's log. `describe`
    returns the scores in the metrics of a run in one line; `then` is called with each result.
    """

    def __init__(
        self,
        total: int | None = None,
        describe: Callable[[Mapping[str, Any]], str] = str,
        then: Callable[[Result], None] = lambda result: None,
    ) -> None:
        self._total, self._describe, self._then, self._seen = total, describe, then, 0
        self._running: dict[Path, tuple[Trial, str]] = {}
        self._activity = Activity("Running", total, "runs", detail=self._detail)

    def __enter__(self) -> Progress:
        self._activity.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._activity.__exit__()

    def start(self, trial: Trial) -> None:
        head = self._next(trial)
        self._running[trial.folder] = trial, head
        trained = (trial.folder / "student" / "config.json").is_file()
        self._print(f"{head}{': its student is trained already, and is scored' if trained else ''} ...")

    def end(self, result: Result, *, earlier: bool = False) -> Result:
        """Print the result of a trial and return it; `earlier`: it is that of an earlier process."""
        _, head = self._running.pop(result.trial.folder, None) or (None, self._next(result.trial))
        self._activity.advance(earlier=earlier)
        if result.metrics is None:
            self._print(f"{head}: FAILED: {result.error}")
        else:
            self._print(f"{head}: {self._describe(result.metrics)}{' (kept)' if earlier else ''}")
        self._then(result)
        return result

    def _next(self, trial: Trial) -> str:
        self._seen += 1
        return f"[{self._seen}/{self._total}] {trial.title}"

    def _print(self, line: str) -> None:
        if self._total is not None:
            say(line)

    def _detail(self) -> str:
        running = [trial for trial, _ in list(self._running.values())]
        return "; ".join(": ".join(filter(None, (trial.title, last_line(trial.log)))) for trial in running)


def last_line(log: Path) -> str:
    """Return the last line of a running program's output that is no border; "" if there is none yet."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))  # the end alone: bars are refreshed each second, and logs grow
        lines = file.read().decode("utf-8", errors="replace").split("\n")
        return " ".join(next((line for line in reversed(lines) if any(map(str.isalnum, line))), "").split())
    return ""


def make_trial(
    root: Path,
    base: RunConfig,
    name: str,
    changes: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    title: str | None = None,
) -> Trial:
    """Return the trial of a recipe with some settings changed.

    `changes` and `settings` are values by dotted key; the settings come from a grid and appear in the title and in the
    folder's name, which ends with a digest of everything that determines the student, so a changed recipe makes new
    trials.
    """
    settings = settings or {}
    values = changed_values(base, {**changes, **settings})
    shaping = shaping_settings(values)
    # Inputs that the study makes itself are identified by their folders. The validation set is part of the identity
    # because it determines the learning curves.
    identity = {
        **shaping,
        "inputs": input_fingerprints(values, made_below=root),
        "ds_config": shaping_ds_config(read_ds_config(values["ds_config"])),
        "valid": values["data"]["valid"],
    }
    folder = "-".join([name, *_pairs(settings, ""), f"seed{values['seed']}", digest(identity)[:8]])
    values["output_dir"] = str(root / "trials" / folder)
    shown = trial_title(name if title is None else title, settings, values["seed"])
    return Trial(shown, settings, values["seed"], build(values, RunConfig, METHODS))


def changed_values(base: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with settings changed by dotted key, as plain JSON values; UserError for unknown ones."""
    values = to_dict(base)
    for key, value in changes.items():
        set_value(values, key, value)
    return values


def trial_title(name: str, settings: Mapping[str, Any], seed: int) -> str:
    """Return the title of a trial, such as `kd learning_rate=0.003 seed=0`."""
    return " ".join([name, *_pairs(settings, "="), f"seed={seed}"])


def _pairs(settings: Mapping[str, Any], sign: str) -> list[str]:
    """Return the values as texts, each after the last part of its key."""
    texts = {key: f"{value:g}" if isinstance(value, float) else str(value) for key, value in settings.items()}
    return [f"{key.rsplit('.', 1)[-1]}{sign}{text}" for key, text in texts.items()]


def settings_that_differ(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return, of each trial, the settings whose values are not the same in all trials, by dotted key."""
    values = [_by_dotted_key(trial.values()) for trial in trials]
    first = values[0] if values else {}
    keys = {key: None for of_trial in values for key in (*first, *of_trial) if first.get(key) != of_trial.get(key)}
    keys.pop("output_dir", None)  # a trial's row has its folder
    return [{key: of_trial.get(key) for key in keys} for of_trial in values]


def _by_dotted_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _by_dotted_key(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def grid_points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of a grid's values, by dotted key; the values of the last key change first."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


@dataclass(frozen=True)
class Choice:
    settings: Mapping[str, Any]
    results: list[Result]
    """The finished trials of these settings, one per seed."""
    best: Result
    """The trial with the best score; the first one if several are equal."""


Merit = Callable[[Result], float]
"""The score of a finished trial by which settings are chosen; the higher, the better."""


def by_settings(results: Sequence[Result]) -> list[list[Result]]:
    """Return the finished trials, grouped by their settings; each group has one trial per seed."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.metrics is not None:
            # As text, because values such as lists have no hash.
            groups.setdefault(repr(dict(result.trial.settings)), []).append(result)
    return list(groups.values())


def choose(results: Sequence[Result], merit: Merit) -> Choice | None:
    """Choose the settings with the best mean score over seeds, the first if several are equal.

    If trials failed, only the settings with the most finished seeds are compared. A single combination of settings
    with a single seed needs no score. Returns None if every trial failed.
    """
    groups = by_settings(results)
    if not groups:
        return None
    most = max(map(len, groups))
    groups = [group for group in groups if len(group) == most]
    chosen = groups[0] if len(groups) == 1 else max(groups, key=lambda group: statistics.fmean(map(merit, group)))
    best = chosen[0] if len(chosen) == 1 else max(chosen, key=merit)
    return Choice(chosen[0].trial.settings, chosen, best)


def may_be_best(results: Sequence[Result], merit: Merit, seeds: int) -> list[Result]:
    """Return the best trial so far, and the best one of the settings that have not run with all `seeds` seeds."""
    groups = by_settings(results)
    leaders = [max(group, key=merit) for group in groups if len(group) < seeds]
    choice = choose([result for group in groups if len(group) == seeds for result in group], merit)
    return leaders if choice is None else [*leaders, choice.best]
