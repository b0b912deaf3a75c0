"""Exact match and F1 against the definitions of the official scripts, written out anew."""

import random
import unicodedata
from collections.abc import Callable

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


def words_only(text: str, is_mark: Callable[[str], bool], articles: list[str]) -> list[str]:
    """Lower case, without marks; then a maximal run of word letters that is an article becomes a space."""
    kept = [letter for letter in text.lower() if not is_mark(letter)]
    out, run = [], ""
    for letter in [*kept, None]:
        if letter is not None and (letter.isalnum() or letter == "_"):
            run += letter
            continue
        out.append(" " if run in articles else run)
        run = ""
        out.append("" if letter is None else letter)
    return "".join(out).split()


def squad_words(text: str) -> list[str]:
    return words_only(text, lambda letter: letter in ASCII_PUNCTUATION, ARTICLES["en"])


def mlqa_words(text: str, language: str) -> list[str]:
    def is_mark(letter: str) -> bool:
        return letter in ASCII_PUNCTUATION or unicodedata.category(letter)[0] == "P"

    if language == "ar":
        kept = "".join(letter for letter in text.lower() if not is_mark(letter))
        return " ".join(kept.split("ال")).split()
    if language in ("hi", "zh"):  # words of combining letters, and words without spaces: no article is looked for
        kept = "".join(letter for letter in text.lower() if not is_mark(letter))
        if language == "hi":
            return kept.split()
        spaced = [f" {letter} " if 0x4E00 <= ord(letter) <= 0x9FA5 else letter for letter in kept]
        return "".join(spaced).split()
    return words_only(text, is_mark, ARTICLES[language])


def naive_f1(mine: list[str], theirs: list[str]) -> float:
    left, common = list(theirs), 0
    for word in mine:
        if word in left:
            left.remove(word)
            common += 1
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


def scored2(answer: str, references: list[str], words: Callable[[str], list[str]], measure: str) -> float:
    right = [words(each) for each in references if words(each)] or [[]]
    mine = words(answer)
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
            float(not references[key])
            if odds[key] > threshold
            else scored2(answers[key], references[key], squad_words, measure)
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


def test_never_answering_is_the_least_best_score():
    references = {"a": ["cat"], "b": [], "c": []}
    found = squad2_scores(dict.fromkeys("abc", "dog"), dict.fromkeys("abc", -5.0), references)
    assert (found["f1"], found["em"]) == (0, 0)
    assert (found["best_f1"], found["best_f1_threshold"]) == (pytest.approx(200 / 3), 0.0)


def test_at_the_threshold_a_question_is_answered():
    """As in the official script, which leaves it unanswered above the threshold alone."""
    found = squad2_scores({"a": "cat", "b": "dog"}, {"a": 0.5, "b": 0.6}, {"a": ["cat"], "b": ["dog"]}, threshold=0.5)
    assert (found["f1"], found["em"]) == (50, 50)


def test_an_answer_of_articles_alone_is_an_answer():
    """As in the official script: words decide what is right, but the letters decide whether there is an answer."""
    found = squad2_scores({"a": "the", "b": "cat"}, {"a": -2.0, "b": -1.0}, {"a": [], "b": ["cat"]})
    assert found["f1"] == 100
    assert (found["best_f1"], found["best_f1_threshold"]) == (50, 0.0)


def test_references_without_words():
    """The definitions differ: SQuAD 1.1 counts no common word as 0, and 2.0 drops a reference without words."""
    assert squad1_scores({"a": "The"}, {"a": ["the"]}) == {"f1": 0, "em": 100}
    assert squad2_scores({"a": ""}, {"a": -1.0}, {"a": ["the"]})["f1"] == 100
    assert squad2_scores({"a": ""}, {"a": -1.0}, {"a": ["the", "cat"]})["f1"] == 0
