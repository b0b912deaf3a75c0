"""The scores of a comparison: which of two is better, and how to read and format them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from llmdistill.report.pages import figure
from llmdistill.tasks.perplexity import show_perplexity


@dataclass(frozen=True, kw_only=True)
class Score:
    """A kind of score, of which every set has one and a model has the average."""

    name: str
    key: str
    """Its metric in the rows of trials, and its key in results.json."""
    title: str
    """Above tables."""
    higher_is_better: bool
    points: str
    """The unit of a difference of two scores."""
    counted: str
    """What a set consists of: examples, or the windows of a text."""
    averaged: str
    """What the average over the sets is."""
    over_decades: bool
    """Whether the scores of models differ by factors, so that their axis is logarithmic."""
    compares_losses: bool
    """Whether the validation losses of two methods can be compared; they are sums of different terms otherwise."""
    mean: Callable[[Iterable[float]], float]
    show: Callable[[float | None], str]

    def best(self, values: Iterable[float]) -> float | None:
        return (max if self.higher_is_better else min)(values, default=None)

    def merit(self, value: float) -> float:
        """Return a number that is the larger the better a score is."""
        return value if self.higher_is_better else -value

    def label(self, sets: Sequence[str]) -> str:
        what = f"{self.name} of {sets[0]}" if len(sets) == 1 else f"{self.name}, average of {len(sets)} sets"
        return what if self.higher_is_better else f"{what}\n(lower is better)"  # in a line it is longer than an axis


ROUGE_L = Score(
    name="ROUGE-L",
    key="rougeL",
    title="ROUGE-L (0–100)",
    higher_is_better=True,
    points="points",
    counted="examples",
    averaged="the mean of the sets",
    over_decades=False,
    compares_losses=True,
    mean=statistics.fmean,
    show=figure,
)
PERPLEXITY = Score(
    name="perplexity",
    key="perplexity",
    title="Perplexity of texts, lower is better",
    higher_is_better=False,
    points="points of perplexity",
    counted="windows",
    averaged="the geometric mean of the texts",
    over_decades=True,
    compares_losses=False,
    mean=statistics.geometric_mean,
    show=show_perplexity,
)
SCORES = {score.key: score for score in (ROUGE_L, PERPLEXITY)}
