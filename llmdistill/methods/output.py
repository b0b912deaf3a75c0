"""The terms on the models' outputs, for tokens and for sequences, shared by the methods that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from llmdistill import losses
from llmdistill.batch import Batch, LossSum, Outputs
from llmdistill.losses.terms import SequenceTerm
from llmdistill.methods.annotations import Tensor
from llmdistill.methods.objective import LABEL, OutputTerm
from llmdistill.objective import Objective


class OutputTerms(NamedTuple):
    """Terms for tokens and for sequences, with their weights."""

    weights: Mapping[str, float]
    token_terms: tuple[losses.TokenTerm, ...]
    sequence_terms: tuple[SequenceTerm, ...]

    def __or__(self, other: OutputTerms) -> OutputTerms:
        """Combine the terms of both."""
        return OutputTerms(
            {**self.weights, **other.weights},
            self.token_terms + other.token_terms,
            self.sequence_terms + other.sequence_terms,
        )


NO_OUTPUT = OutputTerms({}, (), ())


def label_terms(weight: float, objective: Objective) -> OutputTerms:
    """Cross-entropy on labels (`label`), and for sequences cross-entropy on classes or squared error on scores."""
    return _terms(LABEL, weight, objective, losses.TokenTerm(LABEL.token_name, None), False, _label_loss)


def soft_terms(names: OutputTerm, weight: float, objective: Objective, *, temperature: float) -> OutputTerms:
    """Soft cross-entropy (MaKD eq. 18, TinyBERT eq. 10) for tokens and classes; squared error for scores."""

    def loss(student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
        of_student, of_teacher = _logits(student, teacher)
        if objective.sequences == "scores":
            return losses.sequence_score_mse(of_student, of_teacher, batch.has_target())
        return losses.sequence_soft_cross_entropy(of_student, of_teacher, batch.has_target(), temperature=temperature)

    token_term = losses.TokenTerm(names.token_name, losses.SOFT_CROSS_ENTROPY, temperature)
    return _terms(names, weight, objective, token_term, True, loss)


def divergence_terms(
    names: OutputTerm, weight: float, objective: Objective, *, divergence: losses.Divergence, temperature: float
) -> OutputTerms:
    """A divergence for tokens and classes, times the squared temperature; squared error for scores."""

    def loss(student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
        of_student, of_teacher = _logits(student, teacher)
        if objective.sequences == "scores":
            return losses.sequence_score_mse(of_student, of_teacher, batch.has_target())
        return losses.sequence_divergence(
            of_student, of_teacher, batch.has_target(), divergence=divergence.value, temperature=temperature
        )

    token_term = losses.TokenTerm(names.token_name, divergence, temperature, scale=temperature**2)
    return _terms(names, weight, objective, token_term, True, loss)


def _terms(
    names: OutputTerm,
    weight: float,
    objective: Objective,
    token_term: losses.TokenTerm,
    needs_teacher: bool,
    loss: Callable[[Outputs, Outputs | None, Batch], LossSum],
) -> OutputTerms:
    if weight == 0:
        return NO_OUTPUT
    on_sequences = SequenceTerm(names.sequence_name, needs_teacher, loss)
    return OutputTerms(
        dict.fromkeys(names.positions(objective), weight),
        (token_term,) if objective.tokens else (),
        (on_sequences,) if objective.sequences is not None else (),
    )


def _label_loss(student: Outputs, _teacher: Outputs | None, batch: Batch) -> LossSum:
    assert student.sequence_logits is not None, "sequences' targets need a head for them"
    assert batch.targets is not None, "the batch has no targets"
    if batch.targets.is_floating_point():
        return losses.sequence_mse(student.sequence_logits, batch.targets)
    return losses.sequence_cross_entropy(student.sequence_logits, batch.targets)


def _logits(student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
    assert student.sequence_logits is not None, "the student has no head for sequences"
    assert teacher is not None
    assert teacher.sequence_logits is not None, "the teacher has no head for sequences"
    return student.sequence_logits, teacher.sequence_logits
