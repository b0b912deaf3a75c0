"""Losses on attention and relations; tests/unit/methods compares their values with loops over queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.attention import AttentionInputs, RelationInputs, attention_kl, attention_score_mse, relation_kl

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
Sides = tuple[Tensor, Tensor]
"""Queries and keys, or both sides of a relation."""
every_loss = pytest.mark.parametrize("kind", ["student_teacher", "teacher_student", "score_mse", "relation"])


def make(seed: int) -> Sides:
    """Of 4 heads in 2 groups, 3 wide."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn(2, heads, 5, 3, dtype=torch.float64, generator=generator) for heads in (4, 2))


def loss_of(kind: str, student: Sides, teacher: Sides, mask: Tensor, **seen: object) -> LossSum:
    if kind == "relation":
        return relation_kl(RelationInputs(*student), RelationInputs(*teacher), mask, relation_heads=2, **seen)
    inputs = [AttentionInputs(*each, 0.7) for each in (student, teacher)]
    if kind == "score_mse":
        return attention_score_mse(*inputs, mask, **seen)
    return attention_kl(*inputs, mask, direction=kind, **seen)


def spoiled(sides: Sides, mask: Tensor) -> Sides:
    real = mask.bool()[:, None, :, None]
    return torch.where(real, sides[0], torch.nan), torch.where(real, sides[1], torch.inf)


def learned(sides: Sides) -> Sides:
    for side in sides:
        side.requires_grad_()
    return sides


@every_loss
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
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
