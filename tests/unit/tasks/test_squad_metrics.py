"""Exact match and F1 against the definitions of the official scripts, written out anew."""

import itertools
import random
import unicodedata

import pytest

from llmdistill.tasks.squad_metrics import LANGUAGES, squad1_scores, squad2_scores

ASCII_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
ARTICLES = {
    "en": ["a", "an", "the"],
    "es": ["un", "una", "unos", "unas", "el", "la", "los", "las"],
    "de": ["ein", "eine", "einen", "einem", "eines", "einer", "der", "die", "das", "den", "dem", "des"],
    "vi": ["của", "là", "cái", "chiếc", "những"],
}
WORDS = {
    "en": ["the", "The", "an", "Theatre", "cat", "Cat.", "U.S.", "don't", "—", "“cat”", "12,000", "a-b", "  ", "café"],
    "es": ["la", "LOS", "un", "gato", "¿gato?", "¡El", "ellas", "año,", "perro"],
    "de": ["Der", "die", "Katze", "Katzen", "„Katze“", "eines", "einig", "dem.", "12"],
    "vi": ["của", "mèo", "Là", "những", "con", "mèo,", "làng"],
    "ar": ["القط", "قط", "، البيت", "بالبيت", "الـ", "كلب؟", "و"],
    "hi": ["बिल्ली", "।", "घर", "घर,", "एक"],
    "zh": ["猫", "猫狗", "，", "北京market", "2008年", "。", "的", "a the"],
}


def words_only(text: str, is_mark, articles: list[str]) -> list[str]:
    """Lower case, without marks; then a maximal run of word letters that is an article becomes a space."""
    kept = [letter for letter in text.lower() if not is_mark(letter)]
    runs = ["".join(run) for _, run in itertools.groupby(kept, key=lambda letter: letter.isalnum() or letter == "_")]
    return "".join(" " if run in articles else run for run in runs).split()


def squad_words(text: str) -> list[str]:
    return words_only(text, lambda letter: letter in ASCII_PUNCTUATION, ARTICLES["en"])


def mlqa_words(text: str, language: str) -> list[str]:
    def is_mark(letter: str) -> bool:
        return letter in ASCII_PUNCTUATION or unicodedata.category(letter)[0] == "P"

    if language in ARTICLES:
        return words_only(text, is_mark, ARTICLES[language])
    kept = "".join(letter for letter in text.lower() if not is_mark(letter))
    if language == "ar":
        kept = kept.replace("ال", " ")
    elif language == "zh":  # words without spaces
        kept = "".join(f" {letter} " if 0x4E00 <= ord(letter) <= 0x9FA5 else letter for letter in kept)
    return kept.split()


def naive_f1(mine: list[str], theirs: list[str]) -> float:
    common = sum(min(mine.count(word), theirs.count(word)) for word in {*mine})
    return 0.0 if common == 0 else 2 * common / (len(mine) + len(theirs))


def text(draw: random.Random, language: str, least: int = 0) -> str:
    return " ".join(draw.choice(WORDS[language]) for _ in range(draw.randint(least, 5)))


def cases(language: str, *, answerable: bool, seed: int) -> tuple[dict[str, str], dict[str, list[str]]]:
    """100 questions with an answer, which is often one of several references, or none."""
    draw = random.Random(f"{language} {seed}")
    answers, references = {}, {}
    for number in range(100):
        count = draw.randint(1 if answerable else 0, 4)
        references[f"q{number}"] = [text(draw, language, least=1) for _ in range(count)]
        pool = [text(draw, language), text(draw, language), *references[f"q{number}"]]
        answers[f"q{number}"] = draw.choice(pool)
    return answers, references


@pytest.mark.parametrize("language", [None, *LANGUAGES])
def test_squad1_and_mlqa(language):
    answers, references = cases(language or "en", answerable=True, seed=1)
    words = squad_words if language is None else lambda text: mlqa_words(text, language)
    em = f1 = 0.0
    for key, texts in references.items():
        em += max(words(answers[key]) == words(each) for each in texts)
        f1 += max(naive_f1(words(answers[key]), words(each)) for each in texts)
    found = squad1_scores(answers, references, language=language)
    assert found == {"em": pytest.approx(em), "f1": pytest.approx(f1)}
    assert 10 < found["em"] < 90
    assert 10 < found["f1"] < 90


def scored2(answer: str, references: list[str], measure: str) -> float:
    right = [squad_words(each) for each in references if squad_words(each)] or [[]]
    mine = squad_words(answer)
    if measure == "em" or not mine or right == [[]]:
        return float(mine in right)
    return max(naive_f1(mine, each) for each in right)


def test_squad2_with_every_threshold_tried():
    answers, references = cases("en", answerable=False, seed=1)
    draw = random.Random(1)
    answers = {key: answer if squad_words(answer) else "something" for key, answer in answers.items()}
    # Without an answer the odds are higher, as far as the model knows; no two are equal.
    odds = {key: draw.gauss(0.0 if texts else -0.2, 1.0) for key, texts in references.items()}
    found = squad2_scores(answers, odds, references, threshold=0.3)

    def at(threshold: float, measure: str, has: bool | None = None) -> float:
        keys = [key for key in references if has is None or bool(references[key]) is has]
        values = [
            float(not references[key]) if odds[key] > threshold else scored2(answers[key], references[key], measure)
            for key in keys
        ]
        return 100 * sum(values) / len(values)

    assert found["f1"] == pytest.approx(at(0.3, "f1"))
    assert found["em"] == pytest.approx(at(0.3, "em"))
    assert found["has_answer_f1"] == pytest.approx(at(0.3, "f1", True))
    assert found["no_answer_f1"] == pytest.approx(at(0.3, "f1", False))
    assert found["has_answer_em"] == pytest.approx(at(0.3, "em", True))
    assert found["total"] == 100
    for measure in ("f1", "em"):
        never = at(-100.0, measure)
        best, threshold = found[f"best_{measure}"], found[f"best_{measure}_threshold"]
        assert best == pytest.approx(max(never, *(at(each, measure) for each in odds.values())))
        assert threshold == 0.0 if best == never else at(threshold, measure) == pytest.approx(best)
    assert found["best_f1"] > found["f1"]


def test_answers_and_references_without_words():
    """As in the official scripts. Words decide what is right, but the letters decide whether there is an answer.

    SQuAD 1.1 counts no common word as 0, and 2.0 drops a reference without words.
    """
    references = {"a": ["cat"], "b": [], "c": []}
    found = squad2_scores(dict.fromkeys("abc", "dog"), dict.fromkeys("abc", -5.0), references)
    assert (found["f1"], found["em"]) == (0, 0)
    assert (found["best_f1"], found["best_f1_threshold"]) == (pytest.approx(200 / 3), 0.0), "never answering"
    found = squad2_scores({"a": "the", "b": "cat"}, {"a": -2.0, "b": -1.0}, {"a": [], "b": ["cat"]})
    assert (found["f1"], found["best_f1"], found["best_f1_threshold"]) == (100, 50, 0.0)
    assert squad1_scores({"a": "The"}, {"a": ["the"]}) == {"f1": 0, "em": 100}
    assert squad2_scores({"a": ""}, {"a": -1.0}, {"a": ["the"]})["f1"] == 100
    assert squad2_scores({"a": ""}, {"a": -1.0}, {"a": ["the", "cat"]})["f1"] == 0


def test_at_the_threshold_a_question_is_answered():
    """As in the official script, which leaves it unanswered above the threshold alone."""
    found = squad2_scores({"a": "cat", "b": "dog"}, {"a": 0.5, "b": 0.6}, {"a": ["cat"], "b": ["dog"]}, threshold=0.5)
    assert (found["f1"], found["em"]) == (50, 50)
