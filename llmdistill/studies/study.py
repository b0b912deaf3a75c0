"""A study: rows of trials, the choice among the settings of each row, and the runs that follow the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmdistill.studies.launcher import Runner
from llmdistill.studies.trials import Choice, Progress, Result, Trial, choose


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a study tries for one row of its table."""

    key: Any
    """The name by which `Study.run` returns what became of it."""
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
    def failed(self) -> list[Result]:
        unique = {result.trial.folder: result for result in (*self.trials, *self.runs)}
        return [result for result in unique.values() if result.error is not None]


class Study:
    """Many runs that answer one question.

    A study describes its trials as rows, how it chooses among them (`merit`), and what is printed of a finished one
    (`describe`); its `conduct` runs the rows, in several rounds if one needs what another leaves, and what it finds
    becomes a `StudyReport`.
    """

    def merit(self, result: Result) -> float:
        """Return the score of a finished trial on validation; the higher, the better."""
        raise AssertionError(f"{result.trial.title}: nothing is chosen in this study")

    def describe(self, metrics: Mapping[str, Any]) -> str:
        """Return the scores of a finished trial in one line."""
        return ""

    def run(self, rows: Sequence[Row], runner: Runner, progress: Progress | None = None) -> dict[Any, Outcome]:
        """Run the trials that are not finished, choose in each row, and do the runs that follow; by the row's key."""

        def results_of(planned: Mapping[Any, Sequence[Trial]]) -> dict[Any, list[Result]]:
            # Rows may share a trial, as two rows of a table share the distillation of their student.
            trials = {trial.folder: trial for each in planned.values() for trial in each}
            ended = dict(zip(trials, runner.run(list(trials.values()), progress), strict=True))
            return {key: [ended[trial.folder] for trial in each] for key, each in planned.items()}

        tried = results_of({row.key: row.trials for row in rows if row.error is None})
        tried |= {row.key: [Result(trial, None, row.error) for trial in row.trials] for row in rows if row.error}
        choices = {row.key: choose(tried[row.key], self.merit) for row in rows}
        following = {row.key: row.further(choice) for row in rows if (choice := choices[row.key]) is not None}
        added = results_of(following)
        outcomes = {}
        for key, choice in ((row.key, choices[row.key]) for row in rows):
            runs = tried[key] if choice is None else [*choice.results, *added[key]]
            by_folder = {result.trial.folder: result for result in runs}
            outcomes[key] = Outcome(trials=tried[key], choice=choice, runs=list(by_folder.values()))
        return outcomes
