"""Losses on the attention of student and teacher, and on relations among their queries, keys and values."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmdistill.attention_mask import AttentionMask
from llmdistill.batch import LossSum
from llmdistill.losses.fused.block_rows import AttentionKind
from llmdistill.losses.fused.blocks import AttentionInputs, Side, block_loss
from llmdistill.losses.fused.triton import available
from llmdistill.losses.gradient import with_gradient

__all__ = [
    *("AttentionInputs", "AttentionMask", "Direction", "RelationInputs", "attention_kl", "attention_score_mse"),
    *("relation_kl", "repeat_heads", "side_by_side"),
]

Direction = Literal["student_teacher", "teacher_student"]
"""student_teacher is KL(A^S‖A^T), as in MaKD; teacher_student is KL(A^T‖A^S), as in MiniLM."""


class RelationInputs(NamedTuple):
    """The two sides of one relation; for Q-Q, K-K and V-V both are the same tensor."""

    left: Tensor
    """Queries (B, H, T, D), or keys or values (B, G, T, D). Each row gives a distribution over the rows of `right`."""
    right: Tensor
    """Queries, keys or values. The numbers of heads of both sides may differ if one number divides the other."""


def attention_kl(
    student: AttentionInputs,
    teacher: AttentionInputs,
    mask: AttentionMask,
    *,
    direction: Direction = "student_teacher",
) -> LossSum:
    """MaKD eq. 12: KL(A^S‖A^T) of one layer, mean over heads, summed over the queries of real tokens.

    Student and teacher need the same number of query heads H; head width D and key heads G may differ. The scores are
    computed block by block. The gradient is computed together with the value, and only if the student requires it. The
    teacher gets no gradient.

    Args:
        student: queries and keys.
        teacher: queries and keys.
        mask: the keys that each query sees in this layer of both models.
        direction: of the divergence.

    Returns:
        The sum over real queries of the mean over heads, and the number of real tokens.
    """
    return _compute_layer_loss(direction, student, teacher, mask)


def attention_score_mse(student: AttentionInputs, teacher: AttentionInputs, mask: AttentionMask) -> LossSum:
    """TinyBERT eq. 7: squared error of one layer's attention scores before the softmax, summed over real queries.

    KroneckerBERT uses the same attention loss. The error of a query is the mean over heads and over the keys that the
    query can see, so that neither padding nor a mask changes the scale. The arguments are those of `attention_kl`.
    """
    return _compute_layer_loss("score_mse", student, teacher, mask)


def relation_kl(
    student: RelationInputs, teacher: RelationInputs, mask: AttentionMask, *, relation_heads: int
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
        student: both sides of the relation.
        teacher: both sides of the relation.
        mask: as in `attention_kl`.
        relation_heads: must divide the width of each side (after the repetition above) of student and teacher.

    Returns:
        The sum over real tokens of the mean over relation heads, and the number of real tokens.
    """
    of_student, of_teacher = _make_relation(student, relation_heads), _make_relation(teacher, relation_heads)
    return _compute_layer_loss("teacher_student", of_student, of_teacher, mask)


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """Repeat each head of (B, G, T, D) heads/G times in a row, to (B, heads, T, D), as grouped-query attention does."""
    groups = tensor.shape[1]
    assert heads % groups == 0, f"{heads} heads are no multiple of {groups}"
    return tensor if heads == groups else tensor.repeat_interleave(heads // groups, dim=1)


def side_by_side(tensor: Tensor) -> Tensor:
    """Concatenate the heads: (B, H, T, D) to (B, T, H·D)."""
    return tensor.transpose(1, 2).flatten(2)


def _make_relation(sides: RelationInputs, relation_heads: int) -> AttentionInputs:
    """Return a relation as attention inputs with relation heads: (B, R, T, d_r) on both sides, scaled by 1/√d_r."""
    heads, fewest = (choose(side.shape[1] for side in sides) for choose in (max, min))
    assert heads % fewest == 0, f"{heads} heads are no multiple of {fewest}"
    if sides.left is sides.right:
        left_BRTD = right_BRTD = _split_heads(sides.left, relation_heads)  # One tensor object gets one gradient.
    elif heads == relation_heads:
        left_BRTD, right_BRTD = repeat_heads(sides.left, heads), sides.right  # Grouped keys stay grouped.
    else:
        left_BRTD, right_BRTD = (_split_heads(repeat_heads(side, heads), relation_heads) for side in sides)
    return AttentionInputs(left_BRTD, right_BRTD, left_BRTD.shape[-1] ** -0.5)


def _split_heads(heads_BHTD: Tensor, relation_heads: int) -> Tensor:
    flat_BTF = side_by_side(heads_BHTD)
    width = flat_BTF.shape[-1]
    assert width % relation_heads == 0, f"{relation_heads} relation heads do not divide a width of {width}"
    return flat_BTF.unflatten(-1, (relation_heads, width // relation_heads)).transpose(1, 2)


def _compute_layer_loss(
    kind: AttentionKind, student: AttentionInputs, teacher: AttentionInputs, mask: AttentionMask
) -> LossSum:
    heads = student.query.shape[1]
    assert heads == teacher.query.shape[1], "student and teacher must have the same number of heads"
    for inputs in (student, teacher):
        groups = inputs.key.shape[1]
        assert heads % groups == 0, f"{heads} query heads are no multiple of {groups} key heads"
    gradients = set[Side]()
    if torch.is_grad_enabled() and student.query.requires_grad:
        gradients.add("query")
    if torch.is_grad_enabled() and student.key.requires_grad and student.key is not student.query:
        gradients.add("key")  # one tensor has one gradient
    types = {tensor.dtype for inputs in (student, teacher) for tensor in inputs[:2]}
    # The kernels compute in fp32, so fp64 inputs (gradcheck) take the path by torch's operations.
    if available(student.query.device) and torch.float64 not in types:
        from llmdistill.losses.fused.triton_attention import attention_loss  # importing it requires Triton

        loss = attention_loss(kind, student, teacher, mask, gradients)
    else:
        loss = block_loss(kind, student, teacher, mask, gradients)
    total = with_gradient(loss.sum, (student.query, loss.query_grad), (student.key, loss.key_grad))
    # The count stays on the device: the host would wait for a number.
    return LossSum(total, mask.count)
