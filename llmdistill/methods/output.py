"""The output's terms against the teacher, on words and on sequences, as the methods that have them share them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from llmdistill.batch import Batch, LossSum, Outputs
from llmdistill.losses.divergence import output_divergence
from llmdistill.losses.logits import soft_cross_entropy
from llmdistill.losses.sequence import sequence_divergence, sequence_score_mse, sequence_soft_cross_entropy
from llmdistill.methods.objective import Objective, OutputTerm


def soft_terms(
    names: OutputTerm,
    student: Outputs,
    teacher: Outputs,
    batch: Batch,
    objective: Objective,
    *,
    temperature: float,
    causal: bool,
) -> dict[str, LossSum]:
    """Soft cross-entropy (MaKD eq. 18, TinyBERT eq. 10) of words and classes; squared error of scores."""
    terms: dict[str, LossSum] = {}
    if objective.words:
        of_student, of_teacher = _word_logits(student, teacher)
        terms[names.words] = soft_cross_entropy(
            of_student, of_teacher, batch.labels, temperature=temperature, shift=causal
        )
    if objective.sequences == "classes":
        terms[names.sequences] = sequence_soft_cross_entropy(
            *_sequence_logits(student, teacher), batch.has_target(), temperature=temperature
        )
    elif objective.sequences == "scores":
        terms[names.sequences] = sequence_score_mse(*_sequence_logits(student, teacher), batch.has_target())
    return terms


def divergence_terms(
    names: OutputTerm,
    student: Outputs,
    teacher: Outputs,
    batch: Batch,
    objective: Objective,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float,
    causal: bool,
) -> dict[str, LossSum]:
    """A divergence of words and classes, times the squared temperature; squared error of scores."""
    terms: dict[str, LossSum] = {}
    if objective.words:
        of_student, of_teacher = _word_logits(student, teacher)
        terms[names.words] = output_divergence(
            of_student, of_teacher, batch.labels, divergence=divergence, temperature=temperature, shift=causal
        )
    if objective.sequences == "classes":
        terms[names.sequences] = sequence_divergence(
            *_sequence_logits(student, teacher), batch.has_target(), divergence=divergence, temperature=temperature
        )
    elif objective.sequences == "scores":
        terms[names.sequences] = sequence_score_mse(*_sequence_logits(student, teacher), batch.has_target())
    return terms


def _word_logits(student: Outputs, teacher: Outputs) -> tuple[Tensor, Tensor]:
    assert student.logits is not None, "the student has no language-model head"
    assert teacher.logits is not None, "the teacher has no language-model head"
    return student.logits, teacher.logits


def _sequence_logits(student: Outputs, teacher: Outputs) -> tuple[Tensor, Tensor]:
    assert student.sequence_logits is not None, "the student has no head for sequences"
    assert teacher.sequence_logits is not None, "the teacher has no head for sequences"
    return student.sequence_logits, teacher.sequence_logits
