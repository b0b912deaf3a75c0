"""Losses on random numbers, which bench_losses times and gpu_check compares.

A case returns what is learned, and the loss: a scalar whose graph is there. `loss` takes the place of the package's own
function. The second row of a batch has padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmdistill.losses import attention, features, head
from llmdistill.losses.attention import AttentionInputs, Direction, RelationInputs
from llmdistill.losses.head import HeadInputs
from llmdistill.losses.terms import TokenTerm

Made = tuple[list[Tensor], Callable[[], Tensor]]


@dataclass(frozen=True)
class Draw:
    """Normal numbers: the same in every format, but for their rounding."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    rounded: torch.dtype = torch.float32
    """A coarser format that the numbers have been through."""

    def __call__(self, *shape: int, learned: bool, scale: float = 1.0) -> Tensor:
        numbers = (scale * torch.randn(shape)).to(self.rounded)
        return numbers.to(self.device, self.dtype).requires_grad_(learned)

    def mask(self, batch: int, tokens: int) -> Tensor:
        mask = torch.ones(batch, tokens, dtype=torch.int64, device=self.device)
        mask[1:, 3 * tokens // 5 :] = 0
        return mask


def _sides(
    draw: Draw, tokens: int, width: int = 64, heads: int = 8, groups: Sequence[int] = (2, 4), batch: int = 2
) -> list[AttentionInputs]:
    """Queries and keys of student and teacher, with so many key heads each."""
    sides = []
    for learned, keys in zip((True, False), groups, strict=True):
        query, key = (draw(batch, each, tokens, width, learned=learned) for each in (heads, keys))
        sides.append(AttentionInputs(query, key, width**-0.5))
    return sides


def attention_kl(
    draw: Draw,
    *,
    tokens: int,
    causal: bool = True,
    direction: Direction = "student_teacher",
    batch: int = 2,
    loss: Any = attention.attention_kl,
    **sizes: Any,
) -> Made:
    student, teacher = _sides(draw, tokens, batch=batch, **sizes)
    mask = draw.mask(batch, tokens)
    return [*student[:2]], lambda: loss(student, teacher, mask, causal=causal, direction=direction).sum


def attention_score_mse(draw: Draw, *, tokens: int) -> Made:
    (student, teacher), mask = _sides(draw, tokens), draw.mask(2, tokens)
    return [*student[:2]], lambda: attention.attention_score_mse(student, teacher, mask, causal=False).sum


def relation_kl(draw: Draw, *, tokens: int, batch: int = 2, loss: Any = attention.relation_kl) -> Made:
    """Values of both models, 12 heads of 64 each, cut anew into 48."""
    student, teacher = (draw(batch, 12, tokens, 64, learned=learned) for learned in (True, False))
    mask, sides = draw.mask(batch, tokens), (RelationInputs(student, student), RelationInputs(teacher, teacher))
    return [student], lambda: loss(*sides, mask, relation_heads=48, causal=False).sum


def matrix_mse(
    draw: Draw,
    *,
    tokens: int,
    width: int = 64,
    heads: Sequence[int] = (8, 2),
    batch: int = 2,
    loss: Any = features.matrix_mse,
) -> Made:
    """Heads as projections leave them, views of (B, T, H, D); each number of heads is a matrix of its own."""
    mask = draw.mask(batch, tokens)
    pairs = [[draw(batch, tokens, each, width, learned=learned) for learned in (True, False)] for each in heads]

    def call() -> Tensor:
        return torch.stack([loss(*(side.transpose(1, 2) for side in pair), mask).sum for pair in pairs]).sum()

    return [learned for learned, _ in pairs], call


def normalized_mse(draw: Draw, *, tokens: int) -> Made:
    student, teacher = (draw(2, tokens, 1_100, learned=learned) for learned in (True, False))
    mask = draw.mask(2, tokens)
    return [student], lambda: features.matrix_mse(student, teacher, mask, normalize=True).sum


def head_inputs(draw: Draw, *, rows: int, width: int, vocabulary: int) -> tuple[HeadInputs, HeadInputs]:
    """What goes into the LM heads of student and teacher, and their weights."""

    def side(learned: bool) -> HeadInputs:
        weight_scale = 1.5 * width**-0.5
        inputs = draw(rows, width, learned=learned)
        return HeadInputs(inputs, draw(vocabulary, width, learned=learned, scale=weight_scale), None)

    return side(True), side(False)


def head_losses(draw: Draw, *, terms: Sequence[TokenTerm], loss: Any = head.token_losses, **sizes: int) -> Made:
    student, teacher = head_inputs(draw, **sizes)
    labels_N = torch.randint(sizes["vocabulary"], (sizes["rows"],)).to(draw.device)
    factors = torch.tensor([0.7, 0.3][: len(terms)], device=draw.device) / sizes["rows"]
    return [student.rows, student.weight], lambda: loss(student, teacher, labels_N, terms, factors).total
