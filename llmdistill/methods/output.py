"""The terms on the models' outputs, shared by the methods that use them.

A term is computed for tokens, at the positions of the labels, for the targets of a task's head, or for both, as the
objective says. Its name for targets is its name for tokens with their prefix, such as `sequence_`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from llmdistill import losses
from llmdistill.batch import Batch, LossSum, Outputs, Positions
from llmdistill.errors import UserError
from llmdistill.losses.terms import SequenceTerm
from llmdistill.objective import CompareLogits, Objective
from llmdistill.step.method import Terms

SoftPositions = Literal["masked", "all"]
"""The tokens of an encoder whose predictions are compared with the teacher's."""


def positions_of(setting: SoftPositions, *, causal: bool) -> Positions:
    """Return the positions at which a divergence compares the models; a decoder's always predict a label."""
    return "tokens" if setting == "all" and not causal else "labels"


def label_terms(weight: float, objective: Objective) -> Terms:
    """Return the loss on labels: cross-entropy for tokens; for targets their own, such as squared error for scores."""
    token_term = losses.TokenTerm("label", None, smoothing=objective.label_smoothing)
    return _select_terms(token_term, None, weight, objective)


def soft_terms(
    name: str, weight: float, objective: Objective, *, temperature: float, positions: Positions = "labels"
) -> Terms:
    """Return soft cross-entropy (MaKD eq. 18, TinyBERT eq. 10) for tokens and classes; squared error for scores."""
    # Without the factor t²: eq. 18 has none.
    token_term = losses.TokenTerm(name, losses.SOFT_CROSS_ENTROPY, temperature, positions=positions)
    compare = partial(losses.sequence_soft_cross_entropy, temperature=temperature)
    return _select_terms(token_term, compare, weight, objective)


def divergence_terms(
    term: losses.TokenTerm, weight: float, objective: Objective, *, sequence_name: str | None = None
) -> Terms:
    """Return the divergence of a term for tokens and classes, times the squared temperature; squared error for scores.

    `sequence_name` is the name of the term on the objective's targets, without their prefix; by default the term's.
    """
    assert term.divergence is not None, "the labels have terms of their own, label_terms"
    # A softmax at t has gradients 1/t² as large (Hinton et al. 2015, §2).
    scaled = replace(term, scale=term.temperature**2)
    compare = partial(losses.sequence_divergence, divergence=term.divergence.value, temperature=term.temperature)
    return _select_terms(scaled, compare, weight, objective, sequence_name=sequence_name)


def _select_terms(
    token_term: losses.TokenTerm,
    divergence: CompareLogits | None,
    weight: float,
    objective: Objective,
    *,
    sequence_name: str | None = None,
) -> Terms:
    """Return the terms that the objective has; none if the weight is 0. A divergence of None means the labels' loss."""
    terms = Terms({})
    # Left out, not computed with the factor 0: a term that is there has the models run their heads.
    if weight == 0:
        return terms
    # A text with next-sentence targets has both terms, with the same weight.
    if objective.tokens:
        terms |= Terms({token_term.name: weight}, token_terms=(token_term,))
    targets = objective.targets
    if targets is not None:
        if (targets.label_loss if divergence is None else targets.compare) is None:
            raise UserError(
                f"the term {token_term.name} compares probabilities or labels, and sentences (data.kind) have only "
                "embeddings: take method embedding, or give the term the weight 0"
            )
        name = f"{targets.prefix}{sequence_name or token_term.name}"

        def loss(student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
            assert student.sequence_logits is not None, "the student has no head for the targets"
            if divergence is None:
                assert targets.label_loss is not None
                return targets.label_loss(student.sequence_logits, batch)
            assert teacher is not None
            assert teacher.sequence_logits is not None, "the teacher has no head for the targets"
            assert targets.compare is not None
            return targets.compare(student.sequence_logits, teacher.sequence_logits, batch, divergence)

        # The labels' loss needs no teacher.
        term = SequenceTerm(name, divergence is not None, loss, targets.positions)
        terms |= Terms({name: weight}, sequence_terms=(term,))
    return terms
