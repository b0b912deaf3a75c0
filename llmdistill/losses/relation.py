"""KL divergence between the self-attention relations (among queries, keys or values) of student and teacher."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.attention import AttentionInputs, attention_kl


class RelationInputs(NamedTuple):
    """The two sides of one relation; for Q-Q, K-K and V-V both are the same tensor."""

    left: Tensor
    """Queries (B, H, T, D), or keys or values (B, G, T, D). Each row gives a distribution over the rows of `right`."""
    right: Tensor
    """Queries, keys or values. The numbers of heads of both sides may differ if one number divides the other."""


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

    All heads of a side are concatenated and split again into `relation_heads` relation heads. Their width d_r may
    differ between student and teacher. The relation is R = softmax(left · rightᵀ / √d_r). Depth, width and number of
    heads of the two models may differ, as long as `relation_heads` divides the width of both.

    Grouped-query attention: if the sides of a mixed relation (Q-K) have different numbers of heads, the heads of the
    smaller side are repeated first, so that head h meets group h // (H/G), as in the attention itself. With
    relation_heads = H, Q-K is then the attention distribution (scaled by 1/√D), and this loss is `attention_kl` with
    direction teacher_student. In K-K, V-V and K-V both sides have the same number of heads and keep the width G·D.

    Args:
        student: both sides of the student's relation.
        teacher: both sides of the teacher's relation.
        attention_mask: (B, T), 0 at padding, 1 at real tokens; in a packed batch, the number (from 1) of the token's
            sequence. A token is related only to tokens of its own sequence.
        relation_heads: number of relation heads; must divide the width of each side (after the repetition above) of
            student and teacher.
        causal: if True, a token is related only to itself and the tokens before it.
        window: a token is related only to the last `window` positions, including its own; None for no limit.

    Returns:
        The sum over real tokens of the mean over relation heads, and the number of real tokens.
    """
    of_student, of_teacher = _relation(student, relation_heads), _relation(teacher, relation_heads)
    return attention_kl(
        of_student, of_teacher, attention_mask, causal=causal, window=window, direction="teacher_student"
    )


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """(B, G, T, D) as (B, heads, T, D): repeats each head heads/G times in a row, as in grouped-query attention."""
    groups = tensor.shape[1]
    assert heads % groups == 0, f"{heads} heads are no multiple of {groups}"
    return tensor if heads == groups else tensor.repeat_interleave(heads // groups, dim=1)


def side_by_side(tensor: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H·D): concatenates the heads."""
    return tensor.transpose(1, 2).flatten(2)


def _relation(sides: RelationInputs, relation_heads: int) -> AttentionInputs:
    """The relation as attention inputs with relation heads: (B, R, T, d_r) on both sides, scaled by 1/√d_r."""
    heads, fewest = (choose(side.shape[1] for side in sides) for choose in (max, min))
    assert heads % fewest == 0, f"{heads} heads are no multiple of {fewest}"
    if sides.left is sides.right:
        left_BRTD = right_BRTD = _cut(sides.left, relation_heads)  # One tensor object gets one gradient.
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
