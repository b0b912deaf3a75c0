"""A comparison of methods as plain data, its statistics, and its finding in one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmdistill.report.metrics_log import Log
from llmdistill.report.samples import Sample
from llmdistill.report.score import PERPLEXITY, ROUGE_L, Score
from llmdistill.report.tables import Spread, spread
from llmdistill.report.trials import REFERENCE_PERPLEXITY, ModelEntry, TrialRow
from llmdistill.report.weights_on_disk import Checkpoint
from llmdistill.tasks.perplexity import mean_perplexity

TEACHER, UNTRAINED = "teacher", "none"
"""Names of the rows that are not methods; these rows are never the best."""

TABLE_SIZE = "as in the table"

COSTS = (
    *("training_tokens", "training_tokens_per_second", "peak_memory_bytes"),
    *("generation_tokens_per_second", "seconds"),
)

CALIBRATION_COSTS = ("calibration_tokens", "calibration_seconds")
"""The costs of making the untrained student of a start, once for all methods; they follow in costs.json."""


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """A model of the comparison at one size, with its scores over the seeds."""

    name: str
    """The method, or teacher or none, which is the untrained student."""
    label: str
    """The name that the report shows, without the start."""
    score: Score = ROUGE_L
    start: str = ""
    params: int | None = None
    checkpoint: Checkpoint | None = None
    runs: Sequence[TrialRow] = ()
    """The runs at the chosen grid point, one per seed."""
    trials: Sequence[TrialRow] = ()
    """The runs of every grid point that was tried, with the first seed."""
    terms: Sequence[str] = ()
    """The keys of the loss terms in the logs."""
    logs: Mapping[str, Log] = field(default_factory=dict)
    """The rows of metrics.jsonl of `runs`, by folder."""
    calibration: Mapping[str, float] | None = None
    """The values of CALIBRATION_COSTS; None if the comparison has no calibration."""

    @property
    def key(self) -> str:
        """The name that no other row has, such as makd, or makd-loss in a comparison of starts."""
        return f"{self.name}-{self.start}" if self.start else self.name

    @property
    def title(self) -> str:
        """The name that the report shows, such as MaKD, or MaKD from loss in a comparison of starts."""
        return f"{self.label} from {self.start}" if self.start else self.label

    @property
    def checkpoint_bytes(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.size

    @property
    def trained(self) -> bool:
        """Whether the row is a method, not the teacher or the untrained student."""
        return self.name not in (TEACHER, UNTRAINED)

    def entry(self, run: TrialRow) -> ModelEntry:
        """Return what a run says of the row's model."""
        model = {TEACHER: "teacher", UNTRAINED: "untrained"}.get(self.name, "student")
        return run.models.get(model, ModelEntry())

    def of_sets(self, run: TrialRow) -> dict[str, float]:
        """Return the row's score of a run by test set; empty if the run was not scored on them."""
        return self.entry(run).by_set(self.score.key)

    def of_validation(self, run: TrialRow) -> float | None:
        return self.entry(run).on_validation(self.score.key)

    @property
    def ended(self) -> list[TrialRow]:
        """The runs that ended with scores."""
        return [run for run in self.runs if run.error is None and self.of_sets(run)]

    @property
    def failed(self) -> list[TrialRow]:
        """The runs without scores."""
        return [run for run in self.runs if run.error is not None or not self.of_sets(run)]

    @property
    def by_set(self) -> dict[str, Spread]:
        """The scores over seeds by test set; empty if every run failed."""
        return _spread_by_name(map(self.of_sets, self.ended))

    @property
    def by_text(self) -> dict[str, Spread]:
        """The perplexity over seeds by text, where the test sets have another score."""
        if self.score is PERPLEXITY:
            return {}
        return _spread_by_name(self.entry(run).by_set(PERPLEXITY.key) for run in self.ended)

    @property
    def average(self) -> Spread | None:
        """The average over the test sets, over seeds; None if every run failed."""
        return _spread_over_runs(self.score.mean(self.of_sets(run).values()) for run in self.ended)

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """The chosen grid point; None if every run failed."""
        return self.ended[0].settings if self.ended else None

    @property
    def valid(self) -> Spread | None:
        return _spread_over_runs(value for run in self.ended if (value := self.of_validation(run)) is not None)

    @property
    def perplexity(self) -> Spread | None:
        """The geometric mean over the test sets of the references' perplexity, over seeds; None if not measured."""
        measured = (self.entry(run).by_set(REFERENCE_PERPLEXITY) for run in self.ended)
        return _spread_over_runs(mean_perplexity(by_set) for by_set in measured if by_set)

    def cost(self, key: str) -> float | None:
        """Return the median over seeds of one of COSTS."""
        costs: dict[str, Callable[[TrialRow], float | None]] = {
            "training_tokens": lambda run: run.tokens,
            "training_tokens_per_second": lambda run: run.tokens_per_second,
            "peak_memory_bytes": lambda run: run.peak_memory_bytes,
            "generation_tokens_per_second": lambda run: self.entry(run).generation_tokens_per_second,
            "seconds": lambda run: run.seconds,
        }
        values = [value for run in self.ended if (value := costs[key](run)) is not None]
        return statistics.median(values) if values else None


def _spread_over_runs(values: Iterable[float]) -> Spread | None:
    numbers = list(values)
    return spread(numbers) if numbers else None


def _spread_by_name(of_runs: Iterable[Mapping[str, float]]) -> dict[str, Spread]:
    values = list(of_runs)
    return {name: spread([of_run[name] for of_run in values]) for name in (values[0] if values else ())}


@dataclass(frozen=True, kw_only=True)
class UntrainedStudent:
    """How the untrained student of a start was made, at one size."""

    start: str
    """The name of the start; empty for the recipe's own."""
    label: str
    size: str
    folder: str
    """Path relative to the report's folder."""
    params: int | None
    average: float | None
    """The score of the untrained student, the average over the test sets."""
    weighting: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    title: str
    sets: Sequence[str]
    examples: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By test set, how many of its examples (or windows) are scored, and how many it has."""
    texts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """As `examples`, by text beside the test sets."""
    rows: Sequence[ComparisonRow]
    """The teacher, then for each start the untrained student and the methods in the given order."""
    sizes: Sequence[ComparisonRow] = ()
    """The rows for the plot of quality against size, whose labels say the size; empty without further sizes."""
    untrained: Sequence[UntrainedStudent] = ()
    """How the untrained students were made, by size and start; empty without starts and weighting."""
    samples: Sequence[Sample] = ()
    warnings: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    """Command, hardware, versions, decoding, seeds, selection rule and data, by the names that the report shows."""
    paper: Mapping[str, Mapping[str, float]] | None = None
    """The scores in the paper, by row and set."""

    @property
    def score(self) -> Score:
        return self.rows[0].score

    def score_of(self, name: str) -> Score:
        return PERPLEXITY if name in self.texts else self.score

    def heading(self, name: str) -> str:
        """Return the head of a column, such as ``n = 20 of 60``, or of a text ``perplexity, 24 of 141 windows``."""
        counts = {**self.examples, **self.texts}
        if name not in counts:
            return ""
        scored, total = counts[name]
        if self.score_of(name) is PERPLEXITY:
            return "perplexity" + (f", {scored:,} of {total:,} windows" if scored < total else "")
        return f"n = {scored:,}" + (f" of {total:,}" if scored < total else "")

    @property
    def limits(self) -> str:
        """A sentence about the test sets that are scored in part; empty if there is none."""
        parts = {name: counts for name, counts in self.examples.items() if counts[0] < counts[1]}
        if not parts:
            return ""
        numbers = {scored for scored, _ in self.examples.values()}
        if len(parts) == len(self.examples) > 1 and len(numbers) == 1:
            return f"Only {numbers.pop():,} {self.score.counted} of each set are scored."
        listed = ", ".join(f"{scored:,} of {total:,} of {name}" for name, (scored, total) in parts.items())
        return f"Not all {self.score.counted} are scored: {listed}."

    @property
    def teacher(self) -> ComparisonRow | None:
        return next((row for row in self.rows if row.name == TEACHER), None)

    def difference(self, row: ComparisonRow) -> float | None:
        """Return the average score minus the teacher's average score; None if one of them has no average."""
        if self.teacher is None or self.teacher.average is None or row.average is None:
            return None
        return row.average.mean - self.teacher.average.mean


def best_figures(
    rows: Sequence[ComparisonRow], sets: Sequence[str], texts: Iterable[str] = ()
) -> dict[str, float | None]:
    """Return the best method's score in each column, empty without a method that ended."""
    trained = [row for row in rows if row.trained and row.average is not None]
    if not trained:
        return {}
    score = trained[0].score
    best = {name: score.best(row.by_set[name].mean for row in trained) for name in sets}
    best |= {name: PERPLEXITY.best(row.by_text[name].mean for row in trained) for name in texts}
    return {**best, "average": score.best(row.average.mean for row in trained if row.average is not None)}


def describe_finding(rows: Sequence[ComparisonRow], sets: Sequence[str]) -> str:
    """Return the finding in one sentence; a method leads if its lead exceeds one standard error of the difference."""
    where = f"on {sets[0]}" if len(sets) == 1 else f"on the average of {len(sets)} sets"
    ranked = [(row.average, row.title) for row in rows if row.trained and row.average is not None]
    if not ranked:
        return "No method ended with scores."
    score = rows[0].score
    better, worse = ("above", "below") if score.higher_is_better else ("below", "above")

    def points(gap: float) -> str:
        return f"{score.show(abs(gap))} {score.points}"

    ranked.sort(key=lambda item: -score.merit(item[0].mean))
    plain = [row for row in rows if not row.trained and row.average is not None]
    levels = {_plain_name(row): row.average.mean for row in plain if row.average is not None}
    merits = {name: score.merit(level) for name, level in levels.items()}
    untrained = max((_plain_name(row) for row in plain if row.name == UNTRAINED), key=merits.__getitem__, default=None)
    (best, first), *rest = ranked
    if untrained is not None and merits[untrained] >= score.merit(best.mean):
        behind = points(levels[untrained] - best.mean)
        return f"No method is {better} the {untrained}: the best, {first}, is {behind} {worse} it {where}."
    if not rest:
        marks = [
            f"{points(best.mean - value)} {'below' if value > best.mean else 'above'} the {name}"
            for name, value in levels.items()
        ]
        return f"{first} reaches {score.show(best.mean)} {where}{''.join(', ' + mark for mark in marks)}."
    second, runner_up = rest[0]
    gap = abs(best.mean - second.mean)
    if best.std is None or second.std is None:
        lead = f"{first} is {points(gap)} {better} the next best, {runner_up}, {where}"
        return f"{lead}; from one seed, so that chance is not excluded."
    # The means of two methods over their seeds are independent, so their variances add up.
    error = math.hypot(best.std / math.sqrt(len(best.values)), second.std / math.sqrt(len(second.values)))
    margin = f"(standard error of the difference {score.show(error)})"
    if gap > error:
        return f"{first} leads the next best, {runner_up}, by {points(gap)} {where} {margin}."
    return (
        f"No method is ahead beyond one standard error: {first} is {points(gap)} {better} {runner_up} {where} {margin}."
    )


def _plain_name(row: ComparisonRow) -> str:
    name = "untrained student" if row.name == UNTRAINED else row.name
    return f"{name} from {row.start}" if row.start else name
