"""A test whether a model's answers fit their own questions better than other questions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from llmdistill.tasks.rouge import rouge_scores

SHIFTS = 4
"""The number of other questions with which each answer is compared."""


@dataclass(frozen=True)
class Chance:
    """ROUGE-L (0-100) of answers against their own references, and against the references of other questions."""

    own: float
    other: float
    error: float
    """The standard error of the difference between own and other, over the examples."""

    @property
    def is_beaten(self) -> bool:
        """Whether the answers fit their own questions better, by more than two standard errors."""
        return self.own - self.other > 2 * self.error


def measure_chance(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Chance:
    """Score each answer against the references of its own question and of some other questions.

    The other questions follow at fixed cyclic distances, so the result is deterministic. Fluent text has a ROUGE-L
    above 0 against any reference. This value is the chance level, and a teacher must be above it.

    Args:
        predictions: one answer per question, for at least two questions.
        references: the references of each question.
    """
    size = len(predictions)
    assert size == len(references) > 1
    distances = sorted({1 + (size - 2) * shift // SHIFTS for shift in range(SHIFTS)})
    own = rouge_scores(predictions, references)
    shifted = [rouge_scores(predictions, [*references[far:], *references[:far]]) for far in distances]
    other = [statistics.fmean(scores) for scores in zip(*shifted, strict=True)]
    differences = [mine - others for mine, others in zip(own, other, strict=True)]
    return Chance(statistics.fmean(own), statistics.fmean(other), statistics.stdev(differences) / size**0.5)
