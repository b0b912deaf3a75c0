"""Exact match and F1 of answers, as in the official scripts of SQuAD 1.1 and 2.0 and of MLQA (Lewis et al. 2020)."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

Normalize = Callable[[str], str]
"""Maps an answer to the words that are compared, separated by one space."""

_ARTICLES: dict[str, str] = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": "ال",
}
"""The words that MLQA leaves out; in Arabic the article is no word of its own, and its letters go wherever they are."""

LANGUAGES: tuple[str, ...] = ("en", "es", "de", "ar", "hi", "vi", "zh")
"""The languages of MLQA."""

_CHINESE = re.compile("([\u4e00-\u9fa5])")  # the range that MLQA's script takes


def normalize(text: str) -> str:
    """Return an answer in lower case without ASCII punctuation, English articles and extra spaces (SQuAD)."""
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(_ARTICLES["en"], " ", letters).split())


def normalize_mlqa(text: str, language: str) -> str:
    """Return an answer in lower case without punctuation of any script, articles of the language and extra spaces.

    Each Chinese character is a word. `language` is one of LANGUAGES.
    """
    letters = "".join(
        letter
        for letter in text.lower()
        if letter not in string.punctuation and not unicodedata.category(letter).startswith("P")
    )
    if language in _ARTICLES:
        letters = re.sub(_ARTICLES[language], " ", letters)
    if language == "zh":
        letters = _CHINESE.sub(r" \1 ", letters)
    return " ".join(letters.split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the F1 of the common words of two answers, each word as often as it occurs in both: 0 to 1."""
    common = sum((Counter(prediction) & Counter(reference)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(prediction), common / len(reference)
    return 2 * precision * recall / (precision + recall)


class RawScore(NamedTuple):
    """The scores of one answer against the best of its references, from 0 to 1."""

    em: float
    f1: float


def score_answer(prediction: str, references: Sequence[str], of_language: Normalize) -> RawScore:
    """Score an answer against at least one reference (SQuAD 1.1, MLQA)."""
    mine, theirs = of_language(prediction), [of_language(reference) for reference in references]
    return RawScore(float(mine in theirs), max(token_f1(mine.split(), text.split()) for text in theirs))


def score_answer2(prediction: str, references: Sequence[str]) -> RawScore:
    """Score an answer, "" for none, against any number of references (SQuAD 2.0).

    References without a word do not count; without any other one the right answer is "".
    """
    mine = normalize(prediction)
    theirs = [text for text in map(normalize, references) if text] or [""]
    exact = float(mine in theirs)
    if not mine or theirs == [""]:
        return RawScore(exact, exact)
    return RawScore(exact, max(token_f1(mine.split(), text.split()) for text in theirs))


def squad1_scores(
    answers: Mapping[str, str], references: Mapping[str, Sequence[str]], *, language: str | None = None
) -> dict[str, float]:
    """Return `em` and `f1` (0-100) as the script of SQuAD 1.1, or in a language as that of MLQA.

    Args:
        answers: the text of each answer by the id of its question.
        references: the right answers, at least one for each question, in any order of questions.
        language: the language of the answers (one of LANGUAGES); None for SQuAD.
    """
    of_language: Normalize = normalize if language is None else partial(normalize_mlqa, language=language)
    scores = [score_answer(answers[key], texts, of_language) for key, texts in references.items()]
    return {name: 100 * sum(getattr(score, name) for score in scores) / len(scores) for name in ("f1", "em")}


def squad2_scores(
    answers: Mapping[str, str],
    null_odds: Mapping[str, float],
    references: Mapping[str, Sequence[str]],
    *,
    threshold: float = 0.0,
) -> dict[str, float | None]:
    """Return the scores in percent, as the script of SQuAD 2.0 with `--na-prob-file`, which calls `em` exact.

    Args:
        answers: the best span of each question by its id, also where the null odds are high.
        null_odds: how much more probable no answer is than the span; any measure that rises with it.
        references: the right answers of each question; none if it has no answer.
        threshold: f1 and em leave a question unanswered where its null odds are above it.

    Returns:
        ``f1`` and ``em``; ``best_f1``, ``best_f1_threshold``, ``best_em`` and ``best_em_threshold``, at the best
        threshold of these questions; ``has_answer_f1``, ``has_answer_em`` and ``no_answer_f1`` of the questions with
        and without an answer, None if there are none; and ``total``, the number of questions.
    """
    raw = {key: score_answer2(answers[key], texts) for key, texts in references.items()}
    # An unanswered question is right if it has no answer.
    final = {
        key: score if null_odds[key] <= threshold else RawScore(*[float(not references[key])] * 2)
        for key, score in raw.items()
    }
    answerable = [score for key, score in final.items() if references[key]]
    unanswerable = [score for key, score in final.items() if not references[key]]
    # At the lowest threshold every question is unanswered, and those without an answer are right. Each step answers one
    # more question, in the order of the null odds: it gains the score of its span, or loses one point if it has none.
    best: dict[str, tuple[float, float]] = {}  # the score and its threshold
    for name in ("f1", "em"):
        score = highest = float(sum(not texts for texts in references.values()))
        best_threshold = 0.0
        for key in sorted(references, key=lambda key: null_odds[key]):
            if references[key]:
                score += getattr(raw[key], name)
            elif answers[key]:
                score -= 1
            if score > highest:
                highest, best_threshold = score, null_odds[key]
        best[name] = 100 * highest / len(references), best_threshold
    return {
        "f1": _mean(final.values(), "f1"),
        "em": _mean(final.values(), "em"),
        "best_f1": best["f1"][0],
        "best_f1_threshold": best["f1"][1],
        "best_em": best["em"][0],
        "best_em_threshold": best["em"][1],
        "has_answer_f1": _mean(answerable, "f1"),
        "has_answer_em": _mean(answerable, "em"),
        "no_answer_f1": _mean(unanswerable, "f1"),
        "total": len(raw),
    }


def _mean(scores: Collection[RawScore], name: str) -> float | None:
    return 100 * sum(getattr(score, name) for score in scores) / len(scores) if scores else None
