import random
import re
from collections import Counter

import pytest
from nltk.stem.porter import PorterStemmer
from nltk.translate.bleu_score import corpus_bleu
from rouge_score.rouge_scorer import RougeScorer

from llmdistill.tasks import text_metrics as module
from llmdistill.tasks.rouge import measure_chance, rouge_l
from llmdistill.tasks.text_metrics import meteor_scores, text_metrics

WORDS = ["the", "a", "cat", "cats", "sat", "sits", "on", "mat", "mats", "dog", "runs", "run", "ran", "blue"]


def make(count: int, seed: int) -> tuple[list[str], list[list[str]]]:
    """Predictions that are references with some words changed, and one to three references each."""
    chance = random.Random(seed)
    predictions, references = [], []
    for _ in range(count):
        first = [chance.choice(WORDS) for _ in range(chance.randint(5, 12))]
        said = [word if chance.random() < 0.8 else chance.choice(WORDS) for word in first if chance.random() < 0.9]
        others = [[chance.choice(WORDS) for _ in range(6)] for _ in range(chance.randint(0, 2))]
        predictions.append(" ".join(said).capitalize() or "cat")
        references.append([" ".join(words) for words in [first, *others]])
    return predictions, references


@pytest.mark.parametrize("seed", range(3))
def test_bleu4_is_that_of_the_definition(seed):
    """Of Papineni et al. 2002, as NLTK has it."""
    predictions, references = make(10, seed)
    found = text_metrics(["bleu4"], predictions, references)["bleu4"]
    said = [text.lower().split() for text in predictions]
    right = [[text.lower().split() for text in several] for several in references]
    assert found == pytest.approx(100 * corpus_bleu(right, said), abs=1e-9)


def naive_rouge(prediction: str, reference: str, n: int) -> float:
    stemmer = PorterStemmer()

    def grams(text: str) -> Counter[tuple[str, ...]]:
        words = [stemmer.stem(word) if len(word) > 3 else word for word in re.findall(r"[a-z0-9]+", text.lower())]
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    left, right = grams(prediction), grams(reference)
    common = sum((left & right).values())
    return 200 * common / (sum(left.values()) + sum(right.values())) if common else 0.0


@pytest.mark.parametrize(("metric", "n"), [("rouge1", 1), ("rouge2", 2)])
def test_rouge_n_is_that_of_the_definition(metric, n):
    predictions, references = make(200, 3)
    best = [max(naive_rouge(p, each, n) for each in refs) for p, refs in zip(predictions, references, strict=True)]
    assert text_metrics([metric], predictions, references)[metric] == pytest.approx(sum(best) / 200, abs=1e-9)


def test_meteor_by_hand(monkeypatch):
    """3 of 4 words match, two of them by their stems, in one chunk: P 3/4, R 3/3, alpha 0.9, penalty (1/3)^3 / 2."""
    monkeypatch.setattr(module, "has_synonyms", lambda: False)
    (found,) = meteor_scores(["The cat sits down"], [["the cats sit", "no word of it"]])
    precision, recall = 3 / 4, 1.0
    mean = precision * recall / (0.9 * precision + 0.1 * recall)
    assert found == pytest.approx(100 * mean * (1 - 0.5 * (1 / 3) ** 3))
    (swapped,) = meteor_scores(["sits down the cat"], [["the cats sit"]])
    assert swapped == pytest.approx(100 * mean * (1 - 0.5 * (2 / 3) ** 3)), "two chunks"


def test_rouge_l_by_hand():
    assert rouge_l(["The cats ran."], ["the cat ran"]) == pytest.approx(100), "stems are compared"
    assert rouge_l(["a b x c"], ["b a c d e"]) == pytest.approx(100 * 2 * 2 / (4 + 5)), "in order, with gaps"
    assert rouge_l(["", "a b"], ["a b", "a b"]) == pytest.approx(50)
    assert rouge_l(["a b"], [("x", "a b")]) == pytest.approx(100), "the best reference counts"


def sentences(seed: int, count: int = 60) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(f"word{dice.randrange(50)}" for _ in range(6)) for _ in range(count)]


def test_only_answers_to_the_own_question_are_above_chance():
    references, others = sentences(0), sentences(1)
    right = [[text] for text in references]
    assert not any(measure_chance(sentences(seed), right).is_beaten for seed in range(1, 7)), "fluent"
    now_and_then = [own if n % 6 == 0 else text for n, (own, text) in enumerate(zip(references, others, strict=True))]
    assert measure_chance(now_and_then, right).is_beaten
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
