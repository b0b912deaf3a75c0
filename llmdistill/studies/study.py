"""A study: rows of trials, the choice among the settings of each row, and the runs that follow the choice."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmdistill.report.trials import ModelEntry, TrialRow, run_entries, write_trials
from llmdistill.runtime.distributed import on_main
from llmdistill.studies.launcher import Launcher, Runner, shown_command
from llmdistill.studies.trials import Choice, Progress, Result, Trial, choose, settings_that_differ


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """What a study tries for one row of its table."""

    key: Any
    """The name by which `Study.run` returns what became of it."""
    name: str = ""
    """The row's name in study.json, which several rows may have; by default the key."""
    trials: Sequence[Trial]
    further: Callable[[Choice], Sequence[Trial]] = lambda choice: ()
    """Returns the runs that follow the choice, such as other seeds. A run in the folder of a trial adds to its scores,
    such as those on the test sets, and its result replaces the trial's."""
    error: str | None = None
    """Why no trial of the row can run; None if all can."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a row."""

    trials: list[Result]
    choice: Choice | None
    """The best settings; None if every trial failed."""
    runs: list[Result]
    """The results that the table shows: those of the chosen settings, or of all trials if every one failed."""

    @property
    def first(self) -> Result:
        """The result of the row's only trial."""
        return self.runs[0]

    @property
    def ended(self) -> list[Result]:
        """The result of each trial and run, by folder the last one."""
        return list({result.trial.folder: result for result in (*self.trials, *self.runs)}.values())

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.ended if result.error is not None]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Many runs that answer one question.

    A study describes its trials as rows, how it chooses among them (`merit`), and what is printed of a finished one
    (`describe`); its `conduct` runs the rows, in several rounds if one needs what another leaves, and what it finds
    becomes a `StudyReport`. Every round leaves its trials in study.json.
    """

    folder: Path
    """The folder of study.json and of the report."""
    ended: dict[tuple[str, Path], tuple[Trial, TrialRow]] = field(default_factory=dict, init=False, repr=False)
    """What has ended so far, by the row's name and the trial's folder."""

    def merit(self, result: Result) -> float:
        """Return the score of a finished trial on validation; the higher, the better."""
        raise AssertionError(f"{result.trial.title}: nothing is chosen in this study")

    def describe(self, metrics: Mapping[str, Any]) -> str:
        """Return the scores of a finished trial in one line."""
        return ""

    def entries(self, trial: Trial, metrics: Mapping[str, Any]) -> dict[str, ModelEntry]:
        """Return the models that a finished trial has scored, by name."""
        return run_entries(metrics)

    def run(
        self, planned: Sequence[PlannedRow], runner: Runner, progress: Progress | None = None
    ) -> dict[Any, Outcome]:
        """Run the trials that are not finished, choose in each row, and do the runs that follow; by the row's key."""

        def results_of(trials_by_key: Mapping[Any, Sequence[Trial]]) -> dict[Any, list[Result]]:
            # Rows may share a trial, as two rows of a table share the distillation of their student.
            trials = {trial.folder: trial for of_row in trials_by_key.values() for trial in of_row}
            ended = dict(zip(trials, runner.run(list(trials.values()), progress), strict=True))
            return {key: [ended[trial.folder] for trial in of_row] for key, of_row in trials_by_key.items()}

        tried = results_of({row.key: row.trials for row in planned if row.error is None})
        tried |= {row.key: [Result(trial, None, row.error) for trial in row.trials] for row in planned if row.error}
        choices = {row.key: choose(tried[row.key], self.merit) for row in planned}
        following = {row.key: row.further(choice) for row in planned if (choice := choices[row.key]) is not None}
        added = results_of(following)
        outcomes = {}
        for key, choice in choices.items():
            runs = tried[key] if choice is None else [*choice.results, *added[key]]
            by_folder = {result.trial.folder: result for result in runs}
            outcomes[key] = Outcome(trials=tried[key], choice=choice, runs=list(by_folder.values()))
        self._record([(row.name or str(row.key), outcomes[row.key]) for row in planned], runner)
        return outcomes

    def row_of(self, name: str, result: Result) -> TrialRow:
        """Return what study.json has of a trial that has ended in a row of this name."""
        return self.ended[name, result.trial.folder][1]

    def _record(self, outcomes: Sequence[tuple[str, Outcome]], runner: Runner) -> None:
        """Add what has ended to the rows, and write study.json."""
        for name, outcome in outcomes:
            # Without a choice the runs are trials that failed.
            shown = {result.trial.folder for result in outcome.runs if outcome.choice is not None}
            for result in outcome.ended:
                trial, metrics = result.trial, result.metrics
                training = (metrics or {}).get("run", {}).get("training") or {}
                row = TrialRow(
                    row=name,
                    title=trial.title,
                    folder=os.path.relpath(trial.folder, self.folder),
                    command=shown_command(runner.command_of(trial)) if isinstance(runner, Launcher) else "",
                    seed=trial.seed,
                    settings=dict(trial.settings),
                    chosen=trial.folder in shown,
                    models={} if metrics is None else self.entries(trial, metrics),
                    seconds=result.seconds,
                    tokens=training.get("tokens"),
                    tokens_per_second=training.get("tokens_per_second"),
                    peak_memory_bytes=training.get("peak_memory_bytes"),
                    error=result.error,
                )
                self.ended[name, trial.folder] = trial, row
        if not self.ended:
            return
        trials, rows = zip(*self.ended.values(), strict=True)
        configs = settings_that_differ(trials)
        on_main(
            lambda: write_trials(
                self.folder, [replace(row, config=config) for row, config in zip(rows, configs, strict=True)]
            )
        )
