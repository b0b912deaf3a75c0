"""Cross-entropy of the labels, and the rows that predict one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, LossSum, predicted_labels


def label_cross_entropy(logits: Tensor, labels: Tensor, *, shift: bool = True) -> LossSum:
    """Cross-entropy of the labels, summed over the positions that predict one.

    Args:
        logits: (B, T, V).
        labels: (B, T), IGNORE_INDEX where nothing is learnt. Not shifted.
        shift: position i predicts label i+1 (decoders); without it position i predicts label i (masked words).

    Returns:
        The sum over these positions, and their number.
    """
    targets_BT = predicted_labels(labels, shift=shift)
    chosen_BT = targets_BT != IGNORE_INDEX
    loss = functional.cross_entropy(rows_of(logits, chosen_BT), targets_BT[chosen_BT], reduction="sum")
    return LossSum(loss, chosen_BT.sum())


def rows_of(logits: Tensor, chosen_BT: Tensor) -> Tensor:
    """The chosen rows, (N, V), gathered first and only then made at least fp32: V is large and most rows go."""
    rows_NV = logits[chosen_BT]
    return rows_NV.to(torch.promote_types(rows_NV.dtype, torch.float32))
