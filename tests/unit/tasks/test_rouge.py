from __future__ import annotations

import random

import pytest
from rouge_score.rouge_scorer import RougeScorer

from llmdistill.tasks.rouge import measure_chance, rouge_l


def test_by_hand():
    assert rouge_l(["The cats ran."], ["the cat ran"]) == pytest.approx(100), "stems are compared"
    assert rouge_l(["a b x c"], ["b a c d e"]) == pytest.approx(100 * 2 * 2 / (4 + 5)), "in order, with gaps"
    assert rouge_l(["", "a b"], ["a b", "a b"]) == pytest.approx(50)
    assert rouge_l(["a b"], [("x", "a b")]) == pytest.approx(100), "the best reference counts"


TOKENS = [f"word{n}" for n in range(50)]


def sentences(seed: int, count: int = 60) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(TOKENS, k=6)) for _ in range(count)]


def test_only_answers_to_the_own_question_are_above_chance():
    references = sentences(0)
    right = measure_chance(references, [[text] for text in references])
    assert (right.own, right.is_beaten) == (100, True)
    assert right.other < 40
    fluent = measure_chance(sentences(1), [[text] for text in references])
    assert 5 < fluent.own < 40
    assert abs(fluent.own - fluent.other) < 4
    assert not fluent.is_beaten
    now_and_then = [
        own if n % 6 == 0 else text for n, (own, text) in enumerate(zip(references, sentences(1), strict=True))
    ]
    assert measure_chance(now_and_then, [[text] for text in references]).is_beaten
    always = measure_chance(["yes it is"] * 40, [["yes it is"] if n % 2 else ["no it is not"] for n in range(40)])
    assert not always.is_beaten


def test_the_other_score_is_that_of_other_questions():
    references = sentences(0, 5)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    answers = sentences(1, 5)
    expected = [
        scorer.score(references[(index + far) % 5], answers[index])["rougeL"].fmeasure
        for index in range(5)
        for far in (1, 2, 3)  # four distances in a circle of five, the doubled ones once
    ]
    chance = measure_chance(answers, [[text] for text in references])
    assert abs(chance.other - 100 * sum(expected) / len(expected)) < 1e-9
