"""The labels' term, as every method that has one means it."""

from __future__ import annotations

from llmdistill.batch import Batch, LossSum, Outputs
from llmdistill.losses.logits import label_cross_entropy


def label_term(student: Outputs, batch: Batch, *, causal: bool) -> LossSum:
    """Cross-entropy on the labels; 0 where the student wrote them itself, as they say nothing then."""
    loss = label_cross_entropy(student.logits, batch.labels, shift=causal)
    return LossSum(0.0 * loss.sum, loss.count) if batch.own_answers else loss
