"""Losses on random numbers, by the package or plain (plain_losses.py): what bench_losses times and gpu_check compares.

A case takes numbers, whether the loss is the plain one, and sizes, and returns what is learned and the loss. The second
row of a batch has padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plain_losses
import torch
from torch import Tensor

from llmdistill.losses import attention, features, head
from llmdistill.losses.attention import AttentionInputs, Direction, RelationInputs
from llmdistill.losses.head import HeadInputs
from llmdistill.losses.terms import TokenTerm

Made = tuple[list[Tensor], Callable[[], Tensor]]
"""What is learned, and the loss: a scalar whose graph is there."""


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
    draw: Draw, tokens: int, width: int, heads: int, groups: Sequence[int], batch: int
) -> tuple[AttentionInputs, AttentionInputs]:
    """Queries and keys of student and teacher, with so many key heads each."""
    sides = []
    for learned, keys in zip((True, False), groups, strict=True):
        query, key = (draw(batch, each, tokens, width, learned=learned) for each in (heads, keys))
        sides.append(AttentionInputs(query, key, width**-0.5))
    return sides[0], sides[1]


def attention_kl(
    draw: Draw,
    plain: bool,
    *,
    tokens: int,
    width: int = 64,
    heads: int = 8,
    groups: Sequence[int] = (2, 4),
    batch: int = 2,
    causal: bool = True,
    direction: Direction = "student_teacher",
) -> Made:
    student, teacher = _sides(draw, tokens, width, heads, groups, batch)
    mask = draw.mask(batch, tokens)
    function = plain_losses.attention_kl_plain if plain else attention.attention_kl
    return [*student[:2]], lambda: function(student, teacher, mask, causal=causal, direction=direction).sum


def attention_score_mse(draw: Draw, plain: bool, *, tokens: int) -> Made:
    (student, teacher), mask = _sides(draw, tokens, 64, 8, (2, 4), 2), draw.mask(2, tokens)
    function = plain_losses.attention_score_mse_plain if plain else attention.attention_score_mse
    return [*student[:2]], lambda: function(student, teacher, mask, causal=False).sum


def relation_kl(draw: Draw, plain: bool, *, tokens: int, batch: int = 2) -> Made:
    """Values of both models, 12 heads of 64 each, cut anew into 48."""
    student, teacher = (draw(batch, 12, tokens, 64, learned=learned) for learned in (True, False))
    mask, sides = draw.mask(batch, tokens), (RelationInputs(student, student), RelationInputs(teacher, teacher))
    function = plain_losses.relation_kl_plain if plain else attention.relation_kl
    return [student], lambda: function(*sides, mask, relation_heads=48, causal=False).sum


def matrix_mse(
    draw: Draw, plain: bool, *, tokens: int, width: int = 64, heads: Sequence[int] = (8, 2), batch: int = 2
) -> Made:
    """Heads as projections leave them, views of (B, T, H, D); each number of heads is a matrix of its own."""
    mask = draw.mask(batch, tokens)
    pairs = [[draw(batch, tokens, each, width, learned=learned) for learned in (True, False)] for each in heads]
    function = plain_losses.matrix_mse_plain if plain else features.matrix_mse

    def call() -> Tensor:
        return torch.stack([function(*(side.transpose(1, 2) for side in pair), mask).sum for pair in pairs]).sum()

    return [learned for learned, _ in pairs], call


def normalized_mse(draw: Draw, plain: bool, *, tokens: int) -> Made:
    student, teacher = (draw(2, tokens, 1_100, learned=learned) for learned in (True, False))
    mask = draw.mask(2, tokens)
    function = plain_losses.matrix_mse_plain if plain else features.matrix_mse
    return [student], lambda: function(student, teacher, mask, normalize=True).sum


def head_inputs(draw: Draw, *, rows: int, width: int, vocabulary: int) -> tuple[HeadInputs, HeadInputs]:
    """What goes into the LM heads of student and teacher, and their weights."""

    def side(learned: bool) -> HeadInputs:
        weight_scale = 1.5 * width**-0.5
        inputs = draw(rows, width, learned=learned)
        return HeadInputs(inputs, draw(vocabulary, width, learned=learned, scale=weight_scale), None)

    return side(True), side(False)


def head_losses(draw: Draw, plain: bool, *, terms: Sequence[TokenTerm], **sizes: int) -> Made:
    student, teacher = head_inputs(draw, **sizes)
    labels_N = torch.randint(sizes["vocabulary"], (sizes["rows"],)).to(draw.device)
    factors = torch.tensor([0.7, 0.3][: len(terms)], device=draw.device) / sizes["rows"]
    function = plain_losses.token_losses_plain if plain else head.token_losses
    return [student.rows, student.weight], lambda: function(student, teacher, labels_N, terms, factors).total
