"""Mean squared error between hidden states."""

from __future__ import annotations

from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.matrix import matrix_mse


def hidden_mse(student: Tensor, teacher: Tensor, attention_mask: Tensor, *, normalize: bool = False) -> LossSum:
    """MaKD eq. 13: squared error of the layers' outputs (B, T, W), summed over real tokens.

    For students of the teacher's own width; the arithmetic is that of `matrix_mse`.

    Args:
        student: (B, T, W).
        teacher: (B, T, W).
        attention_mask: (B, T), 1 at real tokens.
        normalize: divide each token's error by the variance of the teacher's features at that token.

    Returns:
        The sum over real tokens of the mean over features, and the number of real tokens.
    """
    assert student.dim() == 3, f"hidden states are (B, T, W), these are {tuple(student.shape)}"
    return matrix_mse(student, teacher, attention_mask, normalize=normalize)
