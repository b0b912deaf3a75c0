"""Distances between hidden states: mean squared error and cosine distance."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import LossSum
from llmdistill.losses.matrix import matrix_mse


def hidden_mse(student: Tensor, teacher: Tensor, attention_mask: Tensor, *, normalize: bool = False) -> LossSum:
    """MaKD eq. 13: squared error of the layers' outputs (B, T, W), summed over real tokens.

    Student and teacher must have the same width. The computation is that of `matrix_mse`.

    Args:
        student: (B, T, W).
        teacher: (B, T, W).
        attention_mask: (B, T), 1 at real tokens.
        normalize: if True, divide the error of each token by the variance of the teacher's features at that token.

    Returns:
        The sum over real tokens of the mean over features, and the number of real tokens.
    """
    assert student.dim() == 3, f"hidden states are (B, T, W), these are {tuple(student.shape)}"
    return matrix_mse(student, teacher, attention_mask, normalize=normalize)


def hidden_cosine(student: Tensor, teacher: Tensor, attention_mask: Tensor) -> LossSum:
    """DistilBERT's cosine loss: 1 - cos(student, teacher) of the hidden states (B, T, W), summed over real tokens.

    Args:
        student: (B, T, W).
        teacher: (B, T, W).
        attention_mask: (B, T), 1 at real tokens.

    Returns:
        The sum over real tokens, each between 0 and 2, and the number of real tokens.
    """
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    real_BT = attention_mask.bool()
    dtype = torch.promote_types(student.dtype, torch.float32)
    # Padding is replaced by ones: the cosine of a zero vector is undefined and its gradient is NaN.
    student_BTW, teacher_BTW = (torch.where(real_BT[..., None], each, 1.0).to(dtype) for each in (student, teacher))
    distance_BT = 1 - functional.cosine_similarity(student_BTW, teacher_BTW, dim=-1)
    return LossSum(torch.where(real_BT, distance_BT, 0.0).sum(), real_BT.sum())
