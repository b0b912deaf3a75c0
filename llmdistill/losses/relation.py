"""Divergence between the relations of student and teacher: who among a layer's queries, keys or values is near whom."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.attention import AttentionInputs, attention_kl


class RelationInputs(NamedTuple):
    """The two sides of one relation; the same tensor twice for Q-Q, K-K and V-V."""

    left: Tensor
    """Queries (B, H, T, D), or keys or values (B, G, T, D): the rows, each a distribution over what is on the right."""
    right: Tensor
    """The same choice. The head counts of both sides may differ if one divides the other."""


def relation_kl(
    student: RelationInputs,
    teacher: RelationInputs,
    attention_mask: Tensor,
    *,
    relation_heads: int,
    causal: bool,
    window: int | None = None,
) -> LossSum:
    """MiniLMv2 eq. 6-8: KL(R^T‖R^S) of one layer, mean over relation heads, summed over the rows of real tokens.

    All heads of a side are put side by side and cut anew into R relation heads, whose width d_r is each model's own;
    R = softmax(left · rightᵀ / √d_r). So depth, width and number of heads of the two models are free, as long as R
    divides the width of both.

    Grouped-query attention: where the sides of a mixed relation (Q-K) have different numbers of heads, those of the
    smaller side are repeated first, so that head h stands against group h // (H/G), as in the attention itself. With
    R = H, Q-K is then the attention distribution (scaled by 1/√D) and this loss `attention_kl` from teacher to student.
    Sides of one kind (K-K, V-V, K-V) have the same number and stay as they are: G·D wide.

    Args:
        student: both sides of the student's relation.
        teacher: both sides of the teacher's.
        attention_mask: (B, T), 0 at padding, 1 at real tokens; in a packed batch the number, from 1, of the token's
            sequence, outside of which it is related to nothing.
        relation_heads: R; divides the width of each side, repeated as above, of student and teacher.
        causal: a token is related only to itself and what stands before it.
        window: a token is related only to the last so many positions, itself included; None for all.

    Returns:
        The sum over real tokens of the mean over relation heads, and the number of real tokens.
    """
    of_student, of_teacher = _relation(student, relation_heads), _relation(teacher, relation_heads)
    return attention_kl(
        of_student, of_teacher, attention_mask, causal=causal, window=window, direction="teacher_student"
    )


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """(B, G, T, D) as (B, heads, T, D): each head heads/G times in a row, as query heads read them."""
    groups = tensor.shape[1]
    assert heads % groups == 0, f"{heads} heads are no multiple of {groups}"
    return tensor if heads == groups else tensor.repeat_interleave(heads // groups, dim=1)


def side_by_side(tensor: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H·D), head after head."""
    return tensor.transpose(1, 2).flatten(2)


def _relation(sides: RelationInputs, relation_heads: int) -> AttentionInputs:
    """A relation is an attention distribution of heads cut anew: (B, R, T, d_r) on both sides, scaled by 1/√d_r."""
    heads, fewest = (choose(side.shape[1] for side in sides) for choose in (max, min))
    assert heads % fewest == 0, f"{heads} heads are no multiple of {fewest}"
    if sides.left is sides.right:
        left_BRTD = right_BRTD = _cut(sides.left, relation_heads)  # Still one tensor, with one gradient.
    elif heads == relation_heads:
        left_BRTD, right_BRTD = repeat_heads(sides.left, heads), sides.right  # Grouped keys stay grouped.
    else:
        left_BRTD, right_BRTD = (_cut(repeat_heads(side, heads), relation_heads) for side in sides)
    return AttentionInputs(left_BRTD, right_BRTD, left_BRTD.shape[-1] ** -0.5)


def _cut(heads_BHTD: Tensor, relation_heads: int) -> Tensor:
    flat_BTF = side_by_side(heads_BHTD)
    width = flat_BTF.shape[-1]
    assert width % relation_heads == 0, f"{relation_heads} relation heads do not divide a width of {width}"
    return flat_BTF.unflatten(-1, (relation_heads, width // relation_heads)).transpose(1, 2)
