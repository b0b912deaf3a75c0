"""Distances between features of student and teacher: hidden states, and the outputs of inner matrices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.attention_mask import AttentionMask
from llmdistill.batch import LossSum
from llmdistill.losses.fused.triton import available
from llmdistill.losses.gradient import with_gradient

MIN_SQUARE = 1e-6
"""Lower bound of the teacher's mean square when an error is divided by it: a row of zeros gives a finite error."""


def matrix_mse(
    student: Tensor, teacher: Tensor, attention_mask: Tensor | AttentionMask, *, normalize: bool = False
) -> LossSum:
    """MaKD eq. 15 and 16: squared error of queries, keys, values or feed-forward outputs, summed over real tokens.

    The gradient is computed in the forward pass, so that it is the only tensor saved for the backward pass, in the
    student's dtype.

    Args:
        student: (B, H, T, D) with heads, or (B, T, F) without.
        teacher: the same shape as the student. The teacher gets no gradient.
        attention_mask: (B, T), nonzero at real tokens; or the mask of a batch, which several losses then read once.
        normalize: if True, divide the error of each token by the mean square of the teacher's features at that token
            (over all heads), so that layers and tokens of different scale have equal weight. It is no variance, because
            the mean of rotated queries depends on their position.

    Returns:
        The sum over real tokens of the mean over heads and features, and the number of real tokens. Eq. 16 also
        contains heads, but a feed-forward layer has no heads: its error is the mean over features.
    """
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    mask = attention_mask if isinstance(attention_mask, AttentionMask) else AttentionMask(attention_mask)
    needs_gradient = torch.is_grad_enabled() and student.requires_grad
    if available(student.device) and torch.float64 not in (student.dtype, teacher.dtype):
        from llmdistill.losses.fused import triton_features  # importing it requires Triton

        compute = partial(triton_features.squared_error, student, teacher, mask.real_BT)
    else:
        compute = partial(squared_error, student, teacher, None if mask.is_one_segment else mask.real_BT)
    with torch.no_grad():
        floor = MIN_SQUARE if normalize else None
        total, gradient = compute(min_square=floor, with_gradient=needs_gradient)
    return LossSum(with_gradient(total, (student, gradient)), mask.count)


def hidden_mse(
    student: Tensor, teacher: Tensor, attention_mask: Tensor | AttentionMask, *, normalize: bool = False
) -> LossSum:
    """MaKD eq. 13: squared error of the layers' outputs (B, T, W), as in `matrix_mse`."""
    assert student.dim() == 3, f"hidden states are (B, T, W), these are {tuple(student.shape)}"
    return matrix_mse(student, teacher, attention_mask, normalize=normalize)


def hidden_cosine(student: Tensor, teacher: Tensor, attention_mask: Tensor) -> LossSum:
    """DistilBERT's cosine loss: 1 - cos(student, teacher) of the hidden states (B, T, W).

    The mask is (B, T), 1 at real tokens. Returns the sum over them, each between 0 and 2, and their number.
    """
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    real_BT = attention_mask.bool()
    dtype = torch.promote_types(student.dtype, torch.float32)
    # Padding is replaced by ones: the cosine of a zero vector is undefined and its gradient is NaN.
    student_BTW, teacher_BTW = (torch.where(real_BT[..., None], hidden, 1.0).to(dtype) for hidden in (student, teacher))
    distance_BT = 1 - functional.cosine_similarity(student_BTW, teacher_BTW, dim=-1)
    return LossSum(torch.where(real_BT, distance_BT, 0.0).sum(), real_BT.sum())


def squared_error(
    student: Tensor, teacher: Tensor, real_BT: Tensor | None, *, min_square: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of `matrix_mse`, at least fp32, and its gradient, in the student's dtype, by torch's operations.

    This is the reference of the kernel. `real_BT` is None if all tokens are real. `min_square` is the lower bound of
    the teacher's mean square, by which each error is divided; None does not divide.
    """
    dtype = torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32
    if student.is_meta:  # a memory estimate counts only what the GPU's kernel leaves, not the temporaries below
        return student.new_zeros((), dtype=dtype), torch.empty_like(student) if with_gradient else None
    with_heads = student.dim() == 4
    features = (1, 3) if with_heads else (2,)
    student_features, teacher_features = student.to(dtype), teacher.to(dtype)
    error = student_features - teacher_features
    if real_BT is not None:
        real = real_BT[:, None, :, None] if with_heads else real_BT[..., None]
        # Not a product with the mask: padded positions may hold NaN, and NaN times zero is NaN.
        error.masked_fill_(~real, 0.0)
        teacher_features = torch.where(real, teacher_features, 0.0) if min_square is not None else teacher_features
    count = student.shape[-1] * (student.shape[1] if with_heads else 1)
    weight: Tensor | float = 1 / count
    if min_square is None:
        # Not a dot product: one of millions of numbers would lose precision.
        total = error.square().sum() / count
    else:
        square = teacher_features.square().mean(features, keepdim=True)
        # (B, 1, T, 1) with heads, (B, T, 1) without
        weight = 1 / (square.clamp_min(min_square) * count)
        total = (error.square().sum(features, keepdim=True) * weight).sum()
    return total, error.mul_(2 * weight).to(student.dtype) if with_gradient else None
