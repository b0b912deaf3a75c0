"""ROUGE as in MiniLLM, also for other scripts than Latin, and whether answers fit their own questions best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal

from llmdistill.tasks.words import Words, unicode_words, words_for

SHIFTS = 4
"""The number of other questions with which each answer is compared."""


def rouge_l(predictions: Sequence[str], references: Sequence[str | Sequence[str]], words: Words | None = None) -> float:
    """Return the mean ROUGE-L F1 in percent (0-100) with the best reference (Lin 2004).

    references[i] is one reference or several. If most of their words are in Latin script, texts are compared as
    published, by rouge_score's stems of a-z and 0-9; else by the words of any script, see `unicode_words`. `words`
    chooses one of the two.

    Raises:
        ValueError: the lengths differ or are zero, or a prediction has no reference.
    """
    scores = rouge_scores(predictions, references, words=words)
    return sum(scores) / len(scores)


def reference_words(references: Sequence[str | Sequence[str]]) -> Words:
    """Return how the texts of a set are cut into words; see `words_for`."""
    return words_for(chain.from_iterable([texts] if isinstance(texts, str) else texts for texts in references))


def rouge_scores(
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    kind: Literal["rouge1", "rouge2", "rougeL"] = "rougeL",
    words: Words | None = None,
) -> list[float]:
    """Return the ROUGE-L, or another ROUGE, of each prediction; see rouge_l. A text counts as one sentence."""
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} references")
    if not predictions:
        raise ValueError("no predictions to score")
    # Imported here, because it imports scikit-learn and pandas through nltk.
    from rouge_score.rouge_scorer import RougeScorer

    words = words or reference_words(references)
    # Only the tokenizer of rouge_score itself stems, so that the words of other scripts stay whole.
    tokenizer: Any = {"tokenizer": SimpleNamespace(tokenize=unicode_words)} if words == "unicode" else {}
    scorer = RougeScorer([kind], use_stemmer=True, **tokenizer)
    scores = []
    for index, (prediction, texts) in enumerate(zip(predictions, references, strict=True)):
        targets = [texts] if isinstance(texts, str) else list(texts)
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


def measure_chance(
    predictions: Sequence[str], references: Sequence[Sequence[str]], words: Words | None = None
) -> Chance:
    """Score each of at least two answers against the references of its own question and of some other questions.

    The other questions follow at fixed cyclic distances, so the result is deterministic. Fluent text has a ROUGE-L
    above 0 against any reference. This value is the chance level, and a teacher must be above it.
    """
    size = len(predictions)
    assert size == len(references) > 1
    # A set, because fewer than SHIFTS other questions give the same distance twice; never 0, the own question.
    distances = sorted({1 + (size - 2) * shift // SHIFTS for shift in range(SHIFTS)})
    words = words or reference_words(references)
    own = rouge_scores(predictions, references, words=words)
    shifted = [rouge_scores(predictions, [*references[far:], *references[:far]], words=words) for far in distances]
    other = [statistics.fmean(scores) for scores in zip(*shifted, strict=True)]
    # Paired differences: easy and hard questions would otherwise dominate the standard error.
    differences = [mine - others for mine, others in zip(own, other, strict=True)]
    return Chance(statistics.fmean(own), statistics.fmean(other), statistics.stdev(differences) / size**0.5)
