"""The labels' term, as every method that has one means it."""

from __future__ import annotations

from llmdistill.batch import Batch, LossSum, Outputs
from llmdistill.losses.logits import label_cross_entropy
from llmdistill.losses.sequence import sequence_cross_entropy, sequence_mse
from llmdistill.methods.objective import LABEL, Objective


def label_terms(student: Outputs, batch: Batch, objective: Objective, *, causal: bool) -> dict[str, LossSum]:
    """`label` where there are words to learn, `sequence_label` where sequences have targets."""
    terms: dict[str, LossSum] = {}
    if objective.words:
        terms[LABEL.words] = label_term(student, batch, causal=causal)
    if objective.sequences is not None:
        terms[LABEL.sequences] = sequence_label_term(student, batch)
    return terms


def label_term(student: Outputs, batch: Batch, *, causal: bool) -> LossSum:
    """Cross-entropy on the labels; 0 where the student wrote them itself, as they say nothing then."""
    assert student.logits is not None, "labels need a language-model head"
    loss = label_cross_entropy(student.logits, batch.labels, shift=causal)
    return LossSum(0.0 * loss.sum, loss.count) if batch.own_answers else loss


def sequence_label_term(student: Outputs, batch: Batch) -> LossSum:
    """Cross-entropy on the sequences' classes, or squared error on their scores."""
    assert student.sequence_logits is not None, "sequences' targets need a head for them"
    assert batch.targets is not None, "the batch has no targets"
    if batch.targets.is_floating_point():
        return sequence_mse(student.sequence_logits, batch.targets)
    return sequence_cross_entropy(student.sequence_logits, batch.targets)
