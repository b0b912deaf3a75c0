"""A comparison of methods as plain data, its statistics, and what they say in one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmdistill.errors import UserError
from llmdistill.report.spread import Spread, spread

TEACHER, UNTRAINED = "teacher", "none"
"""Names of the rows that are no method: they are never the best."""

COSTS = (
    "training_tokens",
    "training_tokens_per_second",
    "peak_memory_bytes",
    "generation_tokens_per_second",
    "seconds",
)
"""What a run cost, in the order of costs.json."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a method, with one seed at one point of its grid."""

    method: str
    seed: int
    folder: str
    """Relative to the report's folder."""
    command: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The grid point, by dotted key."""
    rouge_l: Mapping[str, float] | None = None
    """By test set; None where it was not scored on them."""
    valid_rouge_l: float | None = None
    training_tokens: int | None = None
    training_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    seconds: float | None = None
    history: Sequence[Mapping[str, float]] = ()
    """Rows of metrics.jsonl: step, loss, valid_loss (in some rows), and the terms of the loss."""
    error: str | None = None
    """Why it failed, in one line."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model of the comparison."""

    name: str
    """Its key, such as teacher, none or makd."""
    label: str
    """What a reader sees."""
    params: int | None = None
    checkpoint_bytes: int | None = None
    runs: Sequence[Run] = ()
    """At the chosen grid point, one a seed."""
    trials: Sequence[Run] = ()
    """Every grid point that was tried, at the first seed."""
    terms: Sequence[str] = ()
    """Keys of its loss's terms in the history."""


@dataclass(frozen=True, kw_only=True)
class SizePoint:
    """A method's score with a student of another size."""

    method: str
    """Name of its row."""
    params: int
    setting: str
    """What made the size, such as "rank 20"."""
    average: float
    """ROUGE-L, mean of the test sets."""
    folder: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt and what every model answered."""

    set: str
    prompt: str
    reference: str
    answers: Mapping[str, str]
    """By the name of the row."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that a report shows."""

    title: str
    sets: Sequence[str]
    rows: Sequence[Row]
    """Teacher, untrained, then the methods in the order asked for."""
    sizes: Sequence[SizePoint] = ()
    samples: Sequence[Sample] = ()
    warnings: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Command, hardware, versions, decoding, seeds, selection rule, data, by what a reader calls them."""
    paper: Mapping[str, Mapping[str, float]] | None = None
    """The paper's own ROUGE-L by row and set."""
    failures: Sequence[Run] = ()
    """Failed runs that belong to no row, such as those at other sizes."""

    def __post_init__(self) -> None:
        """Refuse what has no place in the table."""
        check_sets(self.sets)
        names = [row.name for row in self.rows]
        assert len(set(names)) == len(names), f"a name is there twice: {names}"


def check_sets(sets: Sequence[str]) -> None:
    """Whether a report can have these test sets.

    Raises:
        UserError: there is none, or one has the name of a column.
    """
    if not sets:
        raise UserError("data.tests is empty: a comparison needs at least one test set; give some as {name: path}")
    if "average" in sets:
        raise UserError("data.tests has a set of the name average, which is the mean of all sets: call it otherwise")


@dataclass(frozen=True)
class Scores:
    """A row's scores over the seeds that ended."""

    row: Row
    ended: list[Run]
    failed: list[Run]
    sets: dict[str, Spread]
    """Empty where every run failed."""
    average: Spread | None
    """Over seeds of the mean of the sets."""

    @property
    def trained(self) -> bool:
        """Whether the row is a method, and not the teacher or the untrained student."""
        return self.row.name not in (TEACHER, UNTRAINED)

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The chosen grid point; None where nothing could be chosen."""
        return self.ended[0].settings if self.ended else None

    @property
    def valid(self) -> Spread | None:
        """ROUGE-L on the validation set."""
        values = [run.valid_rouge_l for run in self.ended if run.valid_rouge_l is not None]
        return spread(values) if values else None

    def cost(self, key: str) -> float | None:
        """Median over seeds of one of COSTS."""
        values = [value for run in self.ended if (value := getattr(run, key)) is not None]
        return statistics.median(values) if values else None


def score_row(row: Row, sets: Sequence[str]) -> Scores:
    """The statistics of one row, over the runs that ended."""
    ended = [run for run in row.runs if run.error is None and run.rouge_l is not None]
    failed = [run for run in row.runs if run not in ended]
    scores = [run.rouge_l for run in ended if run.rouge_l is not None]
    by_set = {name: spread([each[name] for each in scores]) for name in sets} if scores else {}
    average = spread([statistics.fmean(each[name] for name in sets) for each in scores]) if scores else None
    return Scores(row, ended, failed, by_set, average)


def difference_to_teacher(scores: Scores, teacher: Scores | None) -> float | None:
    """Points of the average above the teacher's; None where one of them has none."""
    if teacher is None or teacher.average is None or scores.average is None:
        return None
    return scores.average.mean - teacher.average.mean


def best_figures(scores: Sequence[Scores], sets: Sequence[str]) -> dict[str, float]:
    """The best trained method's score in each column, rounded as the table shows it, so that ties are ties."""
    trained = [each for each in scores if each.trained and each.average is not None]
    if not trained:
        return {}
    best = {name: max(round(each.sets[name].mean, 1) for each in trained) for name in sets}
    return {**best, "average": max(round(each.average.mean, 1) for each in trained if each.average is not None)}


def describe_finding(scores: Sequence[Scores], sets: Sequence[str]) -> str:
    """What the comparison found, in one sentence; a lead counts from one standard error of the difference on."""
    where = f"on {sets[0]}" if len(sets) == 1 else f"on the average of {len(sets)} sets"
    ranked = [(each.average, each.row.label) for each in scores if each.trained and each.average is not None]
    if not ranked:
        return "No method ended with scores."
    ranked.sort(key=lambda item: -item[0].mean)
    plain = {each.row.name: each.average.mean for each in scores if not each.trained and each.average is not None}
    (best, first), *rest = ranked
    if UNTRAINED in plain and plain[UNTRAINED] >= best.mean:
        below = plain[UNTRAINED] - best.mean
        return f"No method is above the untrained student: the best, {first}, is {below:.1f} points below it {where}."
    if not rest:
        marks = [
            f"{abs(best.mean - value):.1f} points {'below' if value > best.mean else 'above'} the {name}"
            for name, value in ((_plain_name(key), value) for key, value in plain.items())
        ]
        return f"{first} reaches {best.mean:.1f} {where}{''.join(', ' + mark for mark in marks)}."
    second, runner_up = rest[0]
    gap = best.mean - second.mean
    if min(len(best.values), len(second.values)) < 2:
        lead = f"{first} is {gap:.1f} points above the next best, {runner_up}, {where}"
        return f"{lead}; from one seed, so that chance is not excluded."
    error = math.sqrt(best.std**2 / len(best.values) + second.std**2 / len(second.values))
    margin = f"(standard error of the difference {error:.1f})"
    if gap > error:
        return f"{first} leads the next best, {runner_up}, by {gap:.1f} points {where} {margin}."
    return (
        f"No method is ahead beyond one standard error: {first} is {gap:.1f} points above {runner_up} {where} {margin}."
    )


def _plain_name(name: str) -> str:
    return "untrained student" if name == UNTRAINED else name
