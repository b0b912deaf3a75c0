"""The terms on the models' outputs, shared by the methods that use them.

A term is computed for tokens, at the positions of the labels, for the targets of sequences, or for both, as the
objective says. Its name for sequences is its name for tokens with the prefix `sequence_`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from llmdistill import losses
from llmdistill.batch import Batch, LossSum, Outputs, Positions
from llmdistill.errors import UserError
from llmdistill.losses.terms import SequenceTerm
from llmdistill.methods.annotations import Tensor
from llmdistill.objective import Objective
from llmdistill.step.method import Terms

SoftPositions = Literal["masked", "all"]
"""The tokens of an encoder whose predictions are compared with the teacher's."""


def positions_of(setting: SoftPositions, *, causal: bool) -> Positions:
    """Return the positions at which a divergence compares the models; a decoder's always predict a label."""
    return "tokens" if setting == "all" and not causal else "labels"


def label_terms(weight: float, objective: Objective) -> Terms:
    """Return the loss on labels: cross-entropy for tokens and for classes of sequences, squared error for scores."""
    on_sequences = SequenceTerm("sequence_label", False, _compute_label_loss)
    on_tokens = losses.TokenTerm("label", None, smoothing=objective.label_smoothing)
    return _select_terms(on_tokens, on_sequences, weight, objective)


def soft_terms(
    name: str, weight: float, objective: Objective, *, temperature: float, positions: Positions = "labels"
) -> Terms:
    """Return soft cross-entropy (MaKD eq. 18, TinyBERT eq. 10) for tokens and classes; squared error for scores."""
    token_term = losses.TokenTerm(name, losses.SOFT_CROSS_ENTROPY, temperature, positions=positions)
    compare = partial(losses.sequence_soft_cross_entropy, temperature=temperature)
    return _select_terms(token_term, _compare_sequences(f"sequence_{name}", compare, objective), weight, objective)


def divergence_terms(
    name: str,
    weight: float,
    objective: Objective,
    *,
    divergence: losses.Divergence,
    temperature: float,
    positions: Positions = "labels",
    spans: Literal["alm", "uld"] = "alm",
    sequence_name: str | None = None,
) -> Terms:
    """Return a divergence for tokens and classes, times the squared temperature; squared error for scores."""
    scale = temperature**2
    token_term = losses.TokenTerm(name, divergence, temperature, scale=scale, positions=positions, spans=spans)
    compare = partial(losses.sequence_divergence, divergence=divergence.value, temperature=temperature)
    return _select_terms(
        token_term, _compare_sequences(sequence_name or f"sequence_{name}", compare, objective), weight, objective
    )


def _select_terms(
    token_term: losses.TokenTerm, on_sequences: SequenceTerm, weight: float, objective: Objective
) -> Terms:
    """Return the terms that the objective has; none if the weight is 0."""
    if weight != 0 and objective.sequences == "embeddings":
        raise UserError(
            f"the term {token_term.name} compares probabilities or labels, and sentences (data.kind) have only "
            "embeddings: take method embedding, or give the term the weight 0"
        )
    terms = Terms({})
    if weight != 0 and objective.tokens:
        terms |= Terms({token_term.name: weight}, token_terms=(token_term,))
    if weight != 0 and objective.sequences is not None:
        terms |= Terms({on_sequences.name: weight}, sequence_terms=(on_sequences,))
    return terms


def _compare_sequences(
    name: str, compare: Callable[[Tensor, Tensor, Tensor], LossSum], objective: Objective
) -> SequenceTerm:
    def loss(student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
        assert student.sequence_logits is not None, "the student has no head for sequences"
        assert teacher is not None
        assert teacher.sequence_logits is not None, "the teacher has no head for sequences"
        # Scores, as of STS-B, have no distribution that a divergence could compare.
        measure = losses.sequence_score_mse if objective.sequences == "scores" else compare
        return measure(student.sequence_logits, teacher.sequence_logits, batch.has_target())

    return SequenceTerm(name, True, loss)


def _compute_label_loss(student: Outputs, _teacher: Outputs | None, batch: Batch) -> LossSum:
    assert student.sequence_logits is not None, "sequences' targets need a head for them"
    assert batch.targets is not None, "the batch has no targets"
    if batch.targets.is_floating_point():
        return losses.sequence_mse(student.sequence_logits, batch.targets)
    return losses.sequence_cross_entropy(student.sequence_logits, batch.targets)
