"""Mean squared error between the outputs of a student's and a teacher's inner matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import LossSum

MIN_VARIANCE = 1e-6
"""Floor under the teacher's variance when an error is divided by it, so that a constant row cannot blow it up."""


def matrix_mse(student: Tensor, teacher: Tensor, attention_mask: Tensor, *, normalize: bool = False) -> LossSum:
    """MaKD eq. 15 and 16: squared error of queries, keys, values or feed-forward outputs, summed over real tokens.

    The gradient is formed with the value, so that nothing but it is kept for the backward pass, in the student's type.

    Args:
        student: (B, H, T, D) heads, or (B, T, F) flat.
        teacher: the same shape. No gradient goes there.
        attention_mask: (B, T), not 0 at real tokens.
        normalize: divide each token's error by the variance of the teacher's features at that token (all heads
            together), so that layers of different scale count alike.

    Returns:
        The sum over real tokens of the mean over heads and features, and the number of real tokens. Eq. 16 is written
        with heads too, but a feed-forward layer has none: there it is the mean over features.
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
    """The loss's sum, the error of each feature in at least fp32, and what each square is multiplied by."""
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    with_heads = student.dim() == 4
    features = (1, 3) if with_heads else (2,)
    real = real_BT[:, None, :, None] if with_heads else real_BT[..., None]
    # A choice, not a product: padded positions may hold anything, and NaN times zero is NaN.
    error = (student.to(dtype) - teacher.to(dtype)).masked_fill_(~real, 0.0)
    count = student.shape[-1] * (student.shape[1] if with_heads else 1)
    if not normalize:
        return _sum_of_squares(error) / count, error, 1 / count
    variance = torch.where(real, teacher.to(dtype), 0.0).var(features, correction=0, keepdim=True)
    weight = 1 / (variance.clamp_min(MIN_VARIANCE) * count)
    return (error.square().sum(features, keepdim=True) * weight).sum(), error, weight


def _sum_of_squares(error: Tensor) -> Tensor:
    """By rows first: a plain dot product of millions of numbers would lose digits."""
    return torch.linalg.vecdot(error, error).sum()
