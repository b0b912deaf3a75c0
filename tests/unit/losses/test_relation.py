from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmdistill.losses.attention import RelationInputs, relation_kl

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
VISIBILITY = [(True, None), (False, None), (True, 2)]
HEADS = {
    "same heads": ((4, 4, 3), (4, 4, 6)),
    "fewer on the right": ((4, 2, 3), (4, 2, 6)),
    "fewer on the left": ((1, 4, 3), (1, 4, 6)),
    "other numbers of heads": ((2, 2, 6), (3, 3, 8)),
}
"""Of student and teacher: heads on the left and the right, and their width."""


def make(seed: int, left: int, right: int, width: int) -> RelationInputs:
    generator = torch.Generator().manual_seed(seed)
    sides = (torch.randn(2, each, 5, width, dtype=torch.float64, generator=generator) for each in (left, right))
    return RelationInputs(*(2 * side for side in sides))


def rows(side: Tensor, heads: int, b: int, t: int) -> list[float]:
    """The features of one token, head after head; head h is that of group h // (heads/groups)."""
    groups = side.shape[1]
    return [float(x) for h in range(heads) for x in side[b, h // (heads // groups), t]]


def naive(student: RelationInputs, teacher: RelationInputs, mask: Tensor, relation_heads: int, **seen: object) -> float:
    """MiniLMv2 eq. 6-8 with lists and loops."""
    tokens = mask.shape[1]

    def distribution(sides: RelationInputs, b: int, a: int, i: int, keys: list[int]) -> list[float]:
        heads = max(sides.left.shape[1], sides.right.shape[1])
        width = heads * sides.left.shape[-1] // relation_heads
        cut = slice(a * width, (a + 1) * width)
        left = rows(sides.left, heads, b, i)[cut]
        scores = [
            sum(x * y for x, y in zip(left, rows(sides.right, heads, b, j)[cut], strict=True)) / math.sqrt(width)
            for j in keys
        ]
        total = sum(math.exp(score) for score in scores)
        return [math.exp(score) / total for score in scores]

    result = 0.0
    for b, i in mask.nonzero().tolist():
        keys = [j for j in range(tokens) if mask[b, j] and (j <= i or not seen["causal"])]
        keys = [j for j in keys if seen["window"] is None or j > i - seen["window"]]
        for a in range(relation_heads):
            p, q = distribution(teacher, b, a, i, keys), distribution(student, b, a, i, keys)
            result += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / relation_heads
    return result


@pytest.mark.parametrize("relation_heads", [1, 4, 6])
@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_equals_the_naive_loop(
    heads: tuple[tuple[int, int, int], ...], mask: Tensor, causal: bool, window: int | None, relation_heads: int
) -> None:
    student, teacher = (make(seed, *each) for seed, each in enumerate(heads))
    loss = relation_kl(student, teacher, mask, relation_heads=relation_heads, causal=causal, window=window)
    expected = naive(student, teacher, mask, relation_heads, causal=causal, window=window)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)
    assert loss.count.item() == mask.sum().item()
    assert expected > 0.1
