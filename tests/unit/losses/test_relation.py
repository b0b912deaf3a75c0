from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmdistill.losses.attention import (
    RelationInputs,
    relation_kl,
    repeat_heads,
    side_by_side,
)

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
VISIBILITY = [(True, None), (False, None), (True, 2)]
HEADS = {"same heads": (4, 4), "fewer on the right": (4, 2), "fewer on the left": (1, 4)}


def make(seed: int, heads: tuple[int, int] = (4, 4), width: int = 3) -> RelationInputs:
    generator = torch.Generator().manual_seed(seed)
    left, right = (2 * torch.randn(2, each, 5, width, dtype=torch.float64, generator=generator) for each in heads)
    return RelationInputs(left, right)


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


@pytest.mark.parametrize("relation_heads", [1, 2, 6])
@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_equals_the_naive_loop(
    heads: tuple[int, int], mask: Tensor, causal: bool, window: int | None, relation_heads: int
) -> None:
    student, teacher = make(0, heads), make(1, heads, width=6)
    loss = relation_kl(student, teacher, mask, relation_heads=relation_heads, causal=causal, window=window)
    expected = naive(student, teacher, mask, relation_heads, causal=causal, window=window)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)
    assert loss.count.item() == mask.sum().item()
    assert expected > 0.1


def test_models_of_other_head_numbers_are_compared() -> None:
    """2 heads of 6 against 3 heads of 8: 4 relation heads are pieces of several heads, or of one."""
    student, teacher = make(0, (2, 2), width=6), make(1, (3, 3), width=8)
    loss = relation_kl(student, teacher, MASKS["left"], relation_heads=4, causal=False)
    expected = naive(student, teacher, MASKS["left"], 4, causal=False, window=None)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("heads", [(2, 2), (2, 1)], ids=["same heads", "groups"])
@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
def test_gradient(causal: bool, window: int | None, heads: tuple[int, int]) -> None:
    student, teacher = make(0, heads, width=2), make(1, heads, width=2)

    def loss(left: Tensor, right: Tensor) -> Tensor:
        sides = RelationInputs(left, right)
        return relation_kl(sides, teacher, MASKS["left"], relation_heads=4, causal=causal, window=window).sum

    torch.autograd.gradcheck(loss, tuple(side.requires_grad_() for side in student))


def test_heads_repeated_and_side_by_side() -> None:
    tensor = torch.arange(12.0).reshape(1, 2, 2, 3)
    assert torch.equal(repeat_heads(tensor, 4)[0, :, 0, 0], torch.tensor([0.0, 0.0, 6.0, 6.0]))
    assert repeat_heads(tensor, 2) is tensor
    assert side_by_side(tensor).tolist() == [[[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]]
