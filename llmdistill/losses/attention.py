"""Losses on the attention of student and teacher, computed from queries and keys: KL divergence, or MSE of scores."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.fused.block_rows import AttentionKind
from llmdistill.losses.fused.blocks import AttentionInputs, BlockLoss, Visibility, block_loss
from llmdistill.losses.fused.triton import available

__all__ = ["AttentionInputs", "Direction", "attention_kl", "attention_score_mse"]

Direction = Literal["student_teacher", "teacher_student"]
"""student_teacher is KL(A^S‖A^T), as in MaKD; teacher_student is KL(A^T‖A^S), as in MiniLM."""


def attention_kl(
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    direction: Direction = "student_teacher",
) -> LossSum:
    """MaKD eq. 12: KL(A^S‖A^T) of one layer, mean over heads, summed over the queries of real tokens.

    Student and teacher need the same number of query heads H; head width D and key heads G may differ. The scores are
    computed block by block. The gradient is computed together with the value, and only if the student requires it. The
    teacher gets no gradient.

    Args:
        student: queries and keys of the student.
        teacher: queries and keys of the teacher.
        attention_mask: (B, T), 0 at padding, 1 at real tokens; in a packed batch, the number (from 1) of the token's
            sequence. A token sees only tokens of its own sequence.
        causal: if True, a token sees only itself and the tokens before it.
        window: a token sees only the last `window` positions, including its own; None for no limit.
        direction: student_teacher is KL(A^S‖A^T), as in MaKD; teacher_student is KL(A^T‖A^S), as in MiniLM.

    Returns:
        The sum over real queries of the mean over heads, and the number of real tokens.
    """
    return _layer_loss(direction, student, teacher, attention_mask, causal=causal, window=window)


def attention_score_mse(
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
) -> LossSum:
    """TinyBERT eq. 7: squared error of one layer's attention scores before the softmax, summed over real queries.

    KroneckerBERT uses the same attention loss. The error of a query is the mean over the keys that the query can see,
    so that neither padding nor a mask changes the scale. Student and teacher need the same number of query heads H;
    head width D and key heads G may differ.

    Args:
        student: queries and keys of the student.
        teacher: queries and keys of the teacher.
        attention_mask: (B, T), 0 at padding, 1 at real tokens; in a packed batch, the number (from 1) of the token's
            sequence. A token sees only tokens of its own sequence.
        causal: if True, a token sees only itself and the tokens before it.
        window: a token sees only the last `window` positions, including its own; None for no limit.

    Returns:
        The sum over real queries of the mean over heads and visible keys, and the number of real tokens.
    """
    return _layer_loss("score_mse", student, teacher, attention_mask, causal=causal, window=window)


def _layer_loss(
    kind: AttentionKind,
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None,
) -> LossSum:
    heads = student.query.shape[1]
    assert heads == teacher.query.shape[1], "student and teacher must have the same number of heads"
    for inputs in (student, teacher):
        groups = inputs.key.shape[1]
        assert heads % groups == 0, f"{heads} query heads are no multiple of {groups} key heads"
    visibility = Visibility(attention_mask, causal, window)
    if torch.is_grad_enabled() and (student.query.requires_grad or student.key.requires_grad):
        both = student.key is student.query
        total = _LayerLoss.apply(
            student.query, None if both else student.key, student.scaling, teacher, kind, visibility
        )
    else:
        total = _loss(kind, student, teacher, visibility, query_grad=False, key_grad=False).sum
    return LossSum(total, (attention_mask != 0).sum())


def _loss(
    kind: AttentionKind,
    student: AttentionInputs,
    teacher: AttentionInputs,
    visibility: Visibility,
    *,
    query_grad: bool,
    key_grad: bool,
) -> BlockLoss:
    """The result of `block_loss`, computed by Triton kernels if they support the device and the dtypes."""
    types = {tensor.dtype for inputs in (student, teacher) for tensor in inputs[:2]}
    if not available(student.query.device) or torch.float64 in types:
        return block_loss(kind, student, teacher, visibility, query_grad=query_grad, key_grad=key_grad)
    from llmdistill.losses.fused.triton_attention import Sides, attention_loss  # importing it requires Triton

    both = student.key is student.query
    loss = attention_loss(
        kind,
        Sides(*student),
        Sides(*teacher),
        visibility.segments_BT,
        causal=visibility.causal,
        window=visibility.window,
        query_grad=query_grad,
        key_grad=key_grad or (both and query_grad),
    )
    if both and query_grad:
        assert loss.query_grad is not None
        assert loss.key_grad is not None
        return BlockLoss(loss.sum, loss.query_grad + loss.key_grad, None)
    return BlockLoss(*loss)


class _LayerLoss(torch.autograd.Function):
    """Computes the gradient in the forward pass, so that the saved tensors are no larger than the inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor | None,
        scaling: float,
        teacher: AttentionInputs,
        kind: AttentionKind,
        visibility: Visibility,
    ) -> Tensor:
        student = AttentionInputs(query, query if key is None else key, scaling)
        query_grad, key_grad = ctx.needs_input_grad[:2]
        loss = _loss(kind, student, teacher, visibility, query_grad=query_grad, key_grad=key_grad)
        ctx.save_for_backward(loss.query_grad, loss.key_grad)
        return loss.sum

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the losses on attention have no second derivative (create_graph=True)")
        (of_sum,) = incoming
        of_query, of_key = (None if x is None else x * of_sum.to(x.dtype) for x in ctx.saved_tensors)
        return of_query, of_key, None, None, None, None
