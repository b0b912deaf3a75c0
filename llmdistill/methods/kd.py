"""Distillation of the output (Hinton et al. 2015; GKD; DistiLLM): a divergence, and the labels beside it."""

from __future__ import annotations

from llmdistill.config import KdConfig
from llmdistill.losses import divergence
from llmdistill.losses.divergence import Divergence
from llmdistill.methods.method import Method
from llmdistill.methods.objective import OutputTerm
from llmdistill.methods.output import divergence_terms, label_terms
from llmdistill.objective import TOKENS, Objective


def divergence_of(settings: KdConfig) -> Divergence:
    """The chosen divergence, of the teacher's and the student's log-probabilities."""
    divergences = {
        "forward_kl": divergence.FORWARD_KL,
        "reverse_kl": divergence.REVERSE_KL,
        "jsd": divergence.jsd_with_derivative(settings.beta),
        "skew_forward_kl": divergence.skew_forward_kl_with_derivative(settings.alpha),
        "skew_reverse_kl": divergence.skew_reverse_kl_with_derivative(settings.alpha),
        "tvd": divergence.TOTAL_VARIATION,
    }
    return divergences[settings.divergence]


def make_kd(settings: KdConfig, *, causal: bool = True, objective: Objective = TOKENS) -> Method:
    """ratio · divergence + (1 - ratio) · cross-entropy on the labels; on words, on what is said of sequences, or both.

    A decoder predicts the next token (causal), an encoder the masked one. The divergence's term has its own name.
    Scores have no distribution: there the squared error stands in both places, as `sequence_mse` to the teacher's.
    Answers that the student wrote itself are no labels: on such batches the divergence stands alone.
    """
    measure = "mse" if objective.sequences == "scores" else settings.divergence
    names = OutputTerm(settings.divergence, f"sequence_{measure}")
    to_teacher = divergence_terms(
        names, settings.ratio, objective, divergence=divergence_of(settings), temperature=settings.temperature
    )
    to_labels = label_terms(1 - settings.ratio, objective)
    return Method(**(to_teacher | to_labels)._asdict(), shift=causal)
