"""ROUGE as in MiniLLM, and whether a model's answers fit their own questions better than other questions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SHIFTS = 4
"""The number of other questions with which each answer is compared."""


def rouge_l(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> float:
    """Return the mean ROUGE-L F1 in percent (0-100), with Porter stemming and the best reference (Lin 2004).

    references[i] is one reference or several.

    Raises:
        ValueError: the lengths differ or are zero, or a prediction has no reference.
    """
    scores = rouge_scores(predictions, references)
    return sum(scores) / len(scores)


def rouge_scores(
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    kind: Literal["rouge1", "rouge2", "rougeL"] = "rougeL",
) -> list[float]:
    """Return the ROUGE-L, or another ROUGE, of each prediction; see rouge_l. A text counts as one sentence."""
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} references")
    if not predictions:
        raise ValueError("no predictions to score")
    # Imported here, because it imports scikit-learn and pandas through nltk.
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer([kind], use_stemmer=True)
    scores = []
    for index, (prediction, given) in enumerate(zip(predictions, references, strict=True)):
        targets = [given] if isinstance(given, str) else list(given)
        if not targets:
            raise ValueError(f"prediction {index} has no reference")
        scores.append(100 * scorer.score_multi(targets, prediction)[kind].fmeasure)
    return scores


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
    """Score each of at least two answers against the references of its own question and of some other questions.

    The other questions follow at fixed cyclic distances, so the result is deterministic. Fluent text has a ROUGE-L
    above 0 against any reference. This value is the chance level, and a teacher must be above it.
    """
    size = len(predictions)
    assert size == len(references) > 1
    distances = sorted({1 + (size - 2) * shift // SHIFTS for shift in range(SHIFTS)})
    own = rouge_scores(predictions, references)
    shifted = [rouge_scores(predictions, [*references[far:], *references[:far]]) for far in distances]
    other = [statistics.fmean(scores) for scores in zip(*shifted, strict=True)]
    differences = [mine - others for mine, others in zip(own, other, strict=True)]
    return Chance(statistics.fmean(own), statistics.fmean(other), statistics.stdev(differences) / size**0.5)
