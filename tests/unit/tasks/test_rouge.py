from __future__ import annotations

import random
import re

import pytest
from nltk.stem.porter import PorterStemmer

from llmdistill.tasks.rouge import rouge_l


def words(text: str) -> list[str]:
    stemmer = PorterStemmer()
    found = re.findall(r"[a-z0-9]+", text.lower())
    return [stemmer.stem(word) if len(word) > 3 else word for word in found]


def longest_common(left: list[str], right: list[str]) -> int:
    """By recursion on prefixes, memoized; unlike the table of rouge_score."""
    memo: dict[tuple[int, int], int] = {}

    def at(i: int, j: int) -> int:
        if i == 0 or j == 0:
            return 0
        if (i, j) not in memo:
            same = left[i - 1] == right[j - 1]
            memo[i, j] = at(i - 1, j - 1) + 1 if same else max(at(i - 1, j), at(i, j - 1))
        return memo[i, j]

    return at(len(left), len(right))


def f1(prediction: str, reference: str) -> float:
    left, right = words(prediction), words(reference)
    common = longest_common(left, right)
    return 2 * common / (len(left) + len(right)) if common else 0.0


def test_against_an_independent_longest_common_subsequence() -> None:
    vocabulary = ["the", "cats", "are", "running", "quickly,", "ran", "run", "Running", "12", "house-boats"]
    vocabulary += ["café", "and", "Flying", "relational", "caresses"]
    generator = random.Random(0)

    def sentence() -> str:
        return " ".join(generator.choices(vocabulary, k=generator.randint(1, 25)))

    predictions = [sentence() for _ in range(60)]
    references = [[sentence() for _ in range(generator.randint(1, 4))] for _ in range(60)]
    expected = [max(f1(p, r) for r in refs) for p, refs in zip(predictions, references, strict=True)]
    assert rouge_l(predictions, references) == pytest.approx(100 * sum(expected) / 60, abs=1e-9)
    assert rouge_l(predictions[:1], references[:1]) == pytest.approx(100 * expected[0], abs=1e-9)


def test_known_values() -> None:
    assert rouge_l(["The cats ran."], ["the cat ran"]) == pytest.approx(100)
    assert rouge_l(["a b"], ["a b c d"]) == pytest.approx(100 * 2 * 0.5 * 1 / 1.5)
    assert rouge_l(["", "a b"], ["a b", "a b"]) == pytest.approx(50)
    assert rouge_l(["a b"], [("x", "a b")]) == pytest.approx(100), "the best reference counts"


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="2 predictions but 1 references"):
        rouge_l(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="no predictions"):
        rouge_l([], [])
    with pytest.raises(ValueError, match="prediction 1 has no reference"):
        rouge_l(["a", "b"], ["a", []])
