"""Whether a model's answers say anything about the questions they answer."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from llmdistill.tasks.rouge import rouge_scores

SHIFTS = 4
"""With how many other questions each answer is compared."""


@dataclass(frozen=True)
class Chance:
    """ROUGE-L (0-100) of answers against their own references, and against those of other questions."""

    own: float
    other: float
    error: float
    """Standard error of the difference, from its spread over the examples."""

    @property
    def is_beaten(self) -> bool:
        """Whether the answers fit their own questions better, beyond two standard errors."""
        return self.own - self.other > 2 * self.error


def measure_chance(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Chance:
    """Score each answer against its own question's references and against those of some others.

    The others are those of the questions that follow at fixed distances, in a circle, so the result is deterministic.
    Fluent text scores some points against any reference: that is chance, and a teacher must be above it.

    Args:
        predictions: one answer a question, two at least.
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
