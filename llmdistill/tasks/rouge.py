"""ROUGE-L as in MiniLLM."""

from __future__ import annotations

from collections.abc import Sequence


def rouge_l(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> float:
    """Return the mean ROUGE-L F1 in percent (0-100), with Porter stemming and the best reference (Lin 2004).

    references[i] is one reference or several.

    Raises:
        ValueError: the lengths differ or are zero, or a prediction has no reference.
    """
    scores = rouge_scores(predictions, references)
    return sum(scores) / len(scores)


def rouge_scores(predictions: Sequence[str], references: Sequence[str | Sequence[str]]) -> list[float]:
    """Return the ROUGE-L of each prediction; see rouge_l."""
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} references")
    if not predictions:
        raise ValueError("no predictions to score")
    # Imported here, because it imports scikit-learn and pandas through nltk.
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    scores = []
    for index, (prediction, given) in enumerate(zip(predictions, references, strict=True)):
        targets = [given] if isinstance(given, str) else list(given)
        if not targets:
            raise ValueError(f"prediction {index} has no reference")
        scores.append(100 * scorer.score_multi(targets, prediction)["rougeL"].fmeasure)
    return scores
