from __future__ import annotations

import random

from rouge_score.rouge_scorer import RougeScorer

from llmdistill.tasks.rouge import measure_chance

TOKENS = [f"word{n}" for n in range(50)]


def sentences(seed: int, count: int = 60) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(TOKENS, k=6)) for _ in range(count)]


def test_right_answers_are_above_chance() -> None:
    references = sentences(0)
    chance = measure_chance(references, [[text] for text in references])
    assert chance.own == 100
    assert chance.other < 40
    assert chance.is_beaten


def test_fluent_answers_to_other_questions_are_at_chance() -> None:
    chance = measure_chance(sentences(1), [[text] for text in sentences(0)])
    assert 5 < chance.own < 40
    assert abs(chance.own - chance.other) < 4
    assert not chance.is_beaten


def test_a_weak_model_that_is_right_now_and_then_is_above_chance() -> None:
    references = sentences(0)
    answers = [
        right if n % 6 == 0 else wrong for n, (right, wrong) in enumerate(zip(references, sentences(1), strict=True))
    ]
    assert measure_chance(answers, [[text] for text in references]).is_beaten


def test_always_the_same_answer_is_at_chance() -> None:
    chance = measure_chance(["yes it is"] * 40, [["yes it is"] if n % 2 else ["no it is not"] for n in range(40)])
    assert not chance.is_beaten


def test_the_other_score_is_that_of_other_questions() -> None:
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


def test_two_questions_are_enough_to_ask() -> None:
    assert measure_chance(["a", "b"], [["a"], ["b"]]).own == 100
