"""Mean squared error between the outputs of a student's and a teacher's inner matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from llmdistill.batch import LossSum

MIN_VARIANCE = 1e-6
"""Floor under the teacher's variance when an error is divided by it, so that a constant row cannot blow it up."""


def matrix_mse(student: Tensor, teacher: Tensor, attention_mask: Tensor, *, normalize: bool = False) -> LossSum:
    """MaKD eq. 15 and 16: squared error of queries, keys, values or feed-forward outputs, summed over real tokens.

    Args:
        student: (B, H, T, D) heads, or (B, T, F) flat.
        teacher: the same shape.
        attention_mask: (B, T), 1 at real tokens.
        normalize: divide each token's error by the variance of the teacher's features at that token (all heads
            together), so that layers of different scale count alike.

    Returns:
        The sum over real tokens of the mean over heads and features, and the number of real tokens. Eq. 16 is written
        with heads too, but a feed-forward layer has none: there it is the mean over features.
    """
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    student_BTF, teacher_BTF = _flat(student), _flat(teacher)
    real_BT = attention_mask.bool()
    real_BT1 = real_BT[..., None]
    # A choice, not a product: padded positions may hold anything, and NaN times zero is NaN.
    error_BTF = torch.where(real_BT1, student_BTF - teacher_BTF, 0.0)
    error_BT = error_BTF.square().mean(-1)
    if normalize:
        variance_BT = torch.where(real_BT1, teacher_BTF, 0.0).var(-1, correction=0)
        error_BT = error_BT / variance_BT.clamp_min(MIN_VARIANCE)
    return LossSum(error_BT.sum(), real_BT.sum())


def _flat(tensor: Tensor) -> Tensor:
    """(B, H, T, D) or (B, T, F), as (B, T, F) of at least fp32."""
    if tensor.dim() == 4:
        tensor = tensor.transpose(1, 2).flatten(2)
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
