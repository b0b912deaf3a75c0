"""Losses on attention against loops over queries and keys, and what they and those on relations have in common."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.attention import (
    AttentionInputs,
    RelationInputs,
    attention_kl,
    attention_score_mse,
    relation_kl,
)

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
KINDS = ["student_teacher", "teacher_student", "score_mse"]
Sides = tuple[Tensor, Tensor]
"""Queries and keys, or both sides of a relation."""

every_kind = pytest.mark.parametrize("kind", KINDS)
every_loss = pytest.mark.parametrize("kind", [*KINDS, "relation"])
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
every_view = pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2)])


def make(seed: int, *, groups: int = 2, width: int = 3, heads: int = 4) -> Sides:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(2, heads, 5, width, dtype=torch.float64, generator=generator)
    key = 2 * torch.randn(2, groups, 5, width, dtype=torch.float64, generator=generator)
    return query, key


def loss_of(
    kind: str,
    student: Sides,
    teacher: Sides,
    mask: Tensor,
    *,
    scalings: tuple[float, float] = (0.7, 0.7),
    **seen: object,
) -> LossSum:
    if kind == "relation":
        return relation_kl(RelationInputs(*student), RelationInputs(*teacher), mask, relation_heads=2, **seen)
    inputs = [AttentionInputs(*each, scaling) for each, scaling in zip((student, teacher), scalings, strict=True)]
    if kind == "score_mse":
        return attention_score_mse(*inputs, mask, **seen)
    return attention_kl(*inputs, mask, direction=kind, **seen)


def naive(
    kind: str,
    student: Sides,
    teacher: Sides,
    mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    visible_until: Tensor | None = None,
    scalings: tuple[float, float] = (0.7, 0.7),
) -> float:
    """MaKD eq. 3 and 12, and TinyBERT eq. 7, with lists and loops."""
    heads, tokens = student[0].shape[1:3]

    def scores_of(inputs: Sides, scaling: float, b: int, h: int, i: int, keys: list[int]) -> list[float]:
        query, key = inputs
        return [scaling * float(query[b, h, i] @ key[b, h * key.shape[1] // heads, j]) for j in keys]

    def distribution(scores: list[float]) -> list[float]:
        total = sum(math.exp(score) for score in scores)
        return [math.exp(score) / total for score in scores]

    result = 0.0
    for b, i in mask.nonzero().tolist():
        keys = [j for j in range(tokens) if mask[b, j] and (j <= i or not causal)]
        keys = [j for j in keys if window is None or j > i - window]
        keys = [j for j in keys if visible_until is None or j < visible_until[b, i]]
        for h in range(heads):
            s, t = (scores_of(each, x, b, h, i, keys) for each, x in zip((student, teacher), scalings, strict=True))
            if kind == "score_mse":
                result += sum((x - y) ** 2 for x, y in zip(s, t, strict=True)) / len(keys) / heads
                continue
            p, q = distribution(s), distribution(t)
            if kind == "teacher_student":
                p, q = q, p
            result += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / heads
    return result


def spoiled(sides: Sides, mask: Tensor) -> Sides:
    real = mask.bool()[:, None, :, None]
    return torch.where(real, sides[0], torch.nan), torch.where(real, sides[1], torch.inf)


def learned(sides: Sides) -> Sides:
    for side in sides:
        side.requires_grad_()
    return sides


@every_kind
@every_view
@every_mask
def test_equals_the_naive_loop(mask: Tensor, causal: bool, window: int | None, kind: str) -> None:
    student, teacher = make(0), make(1, groups=1, width=6)
    given = {"causal": causal, "window": window, "scalings": (0.7, 0.3)}
    loss, expected = loss_of(kind, student, teacher, mask, **given), naive(kind, student, teacher, mask, **given)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)
    assert loss.count.item() == mask.sum().item()
    assert expected > 0.1


@every_kind
def test_a_token_sees_no_key_beyond_what_it_sees(kind: str) -> None:
    """A source of 2 tokens with a target of 1, and a source of 3 with a target of 2."""
    student, teacher, mask = make(0), make(1, groups=1, width=6), MASKS["right"]
    visible_until = torch.tensor([[2, 2, 3, 5, 5], [3, 3, 3, 4, 5]])
    loss = loss_of(kind, student, teacher, mask, causal=False, visible_until=visible_until).sum.item()
    assert loss == pytest.approx(
        naive(kind, student, teacher, mask, causal=False, visible_until=visible_until), rel=1e-10
    )
    assert abs(loss - loss_of(kind, student, teacher, mask, causal=False).sum.item()) > 0.1


@every_loss
@every_view
@every_mask
def test_padding_does_not_matter(mask: Tensor, causal: bool, window: int | None, kind: str) -> None:
    results = []
    for student, teacher in ((make(0), make(1)), (spoiled(make(0), mask), spoiled(make(1), mask))):
        loss = loss_of(kind, learned(student), teacher, mask, causal=causal, window=window)
        loss.sum.backward()
        results.append((loss.sum.detach(), student[0].grad, student[1].grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    padded = ~mask.bool()[:, None, :, None]
    assert not results[1][1].masked_select(padded).any()
    assert not results[1][2].masked_select(padded).any()


@every_loss
def test_gradient(kind: str) -> None:
    """Other masks and views: test_blocks.py, against autograd of the plain losses."""
    teacher = make(1)

    def loss(*student: Tensor) -> Tensor:
        return loss_of(kind, student, teacher, MASKS["left"], causal=True, window=2).sum

    torch.autograd.gradcheck(loss, learned(make(0)))
    assert loss(*teacher).item() == 0.0
