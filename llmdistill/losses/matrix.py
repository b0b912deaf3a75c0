"""Mean squared error between the outputs of the student's and the teacher's inner matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import LossSum

MIN_VARIANCE = 1e-6
"""Lower bound of the teacher's variance when an error is divided by it, so that a constant row gives a finite error."""


def matrix_mse(student: Tensor, teacher: Tensor, attention_mask: Tensor, *, normalize: bool = False) -> LossSum:
    """MaKD eq. 15 and 16: squared error of queries, keys, values or feed-forward outputs, summed over real tokens.

    The gradient is computed in the forward pass, so that it is the only tensor saved for the backward pass, in the
    student's dtype.

    Args:
        student: (B, H, T, D) with heads, or (B, T, F) without.
        teacher: the same shape as the student. The teacher gets no gradient.
        attention_mask: (B, T), nonzero at real tokens.
        normalize: if True, divide the error of each token by the variance of the teacher's features at that token
            (over all heads), so that layers of different scale have equal weight.

    Returns:
        The sum over real tokens of the mean over heads and features, and the number of real tokens. Eq. 16 also
        contains heads, but a feed-forward layer has no heads: its error is the mean over features.
    """
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    real_BT = attention_mask != 0
    if torch.is_grad_enabled() and student.requires_grad:
        total = _SquaredError.apply(student, teacher, real_BT, normalize)
    else:
        total = _squared_error(student, teacher, real_BT, normalize)[0]
    return LossSum(total, real_BT.sum())


class _SquaredError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, real_BT: Tensor, normalize: bool) -> Tensor:
        total, error, weight = _squared_error(student, teacher, real_BT, normalize)
        ctx.save_for_backward(error.mul_(2 * weight).to(student.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the squared error of inner matrices has no second derivative (create_graph=True)")
        (gradient,) = ctx.saved_tensors
        (of_sum,) = incoming
        return gradient * of_sum.to(gradient.dtype), None, None, None


def _squared_error(
    student: Tensor, teacher: Tensor, real_BT: Tensor, normalize: bool
) -> tuple[Tensor, Tensor, Tensor | float]:
    """The sum of the loss, the error of each feature in at least fp32, and the weight of each squared error."""
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    with_heads = student.dim() == 4
    features = (1, 3) if with_heads else (2,)
    real = real_BT[:, None, :, None] if with_heads else real_BT[..., None]
    # masked_fill instead of a product: padded positions may hold NaN, and NaN times zero is NaN.
    error = (student.to(dtype) - teacher.to(dtype)).masked_fill_(~real, 0.0)
    count = student.shape[-1] * (student.shape[1] if with_heads else 1)
    if not normalize:
        return _sum_of_squares(error) / count, error, 1 / count
    variance = torch.where(real, teacher.to(dtype), 0.0).var(features, correction=0, keepdim=True)
    weight = 1 / (variance.clamp_min(MIN_VARIANCE) * count)
    return (error.square().sum(features, keepdim=True) * weight).sum(), error, weight


def _sum_of_squares(error: Tensor) -> Tensor:
    """The sum of squares, summed by rows first: one dot product of millions of numbers would lose precision."""
    return torch.linalg.vecdot(error, error).sum()
