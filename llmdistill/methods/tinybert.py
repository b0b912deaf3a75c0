"""TinyBERT (Jiao et al. 2020): loss on embedding, attention scores, evenly spread hidden states, and logits."""

from __future__ import annotations

from dataclasses import dataclass

from llmdistill.batch import Aspect
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import check_weights
from llmdistill.methods.layer_map import LayerPair, check_heads, pair_layers, same_direction, uniform_map
from llmdistill.methods.layer_terms import score_term, state_term
from llmdistill.methods.method import Method
from llmdistill.methods.objective import OutputTerm
from llmdistill.methods.output import soft_terms
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective


@dataclass(frozen=True, kw_only=True)
class TinybertConfig:
    """TinyBERT's distillation of embedding, attention and hidden states, with the teacher's layers evenly spread
    over the student's (Jiao et al. 2020, eq. 7-9). Learnt matrices map the student's width to the teacher's. A
    weight of 0 drops the term."""

    attention: float = 1.0
    """Weight of the MSE of the attention scores before the softmax; both models need the same number of heads."""
    hidden: float = 1.0
    """Weight of the MSE of the layers' outputs."""
    embedding: float = 1.0
    """Weight of the MSE of the embedding's output."""
    soft: float = 0.0
    """Weight of the soft cross-entropy on the logits (eq. 10): for a task, not for general distillation."""
    temperature: float = 1.0
    """Temperature of the soft cross-entropy."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a weight is negative, all weights are 0, or the temperature is not positive.
        """
        check_weights("tinybert", self, ("attention", "hidden", "embedding", "soft"))
        if not self.temperature > 0:
            raise ValueError(f"tinybert.temperature is {self.temperature}: give a number over 0")


SOFT = OutputTerm("soft", "sequence_soft")
"""Soft cross-entropy on the logits."""

INNER_TERMS: tuple[str, ...] = ("attention", "hidden", "embedding")


def build_tinybert(
    settings: TinybertConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """MSE of the attention scores (eq. 7), hidden states (eq. 8) and embedding (eq. 9); soft cross-entropy (eq. 10).

    Layer m of the student learns from layer m·L/M of the teacher; a term is the sum over the student's layers (eq. 11).
    If the widths differ, one learnt matrix maps the hidden states of all layers, and another maps the embedding.

    Raises:
        UserError: one model is a decoder and the other an encoder, or the attention loss is used and the numbers of
            heads or the attention windows differ.
    """
    causal = same_direction(teacher, student, method="tinybert")
    of_student, of_teacher = shape_of(student), shape_of(teacher)
    layers = list(enumerate(uniform_map(of_student.num_layers, of_teacher.num_layers)))
    weights = {name: float(getattr(settings, name)) for name in INNER_TERMS if getattr(settings, name) > 0}
    widths = of_student.hidden_size, of_teacher.hidden_size
    mapped: tuple[Aspect, ...] = ("hidden", "embedding") if widths[0] != widths[1] else ()
    projections = {aspect: widths for aspect in mapped if aspect in weights}
    terms: list[LayerTerm] = []
    if "attention" in weights:
        check_heads(teacher, student, method="tinybert.attention")
        pairs = pair_layers(layers, teacher, student, method="tinybert.attention")
        terms += [score_term(pair, causal=causal) for pair in pairs]
    if "hidden" in weights:
        pairs = [LayerPair(mine, theirs, None) for mine, theirs in layers]
        terms += [state_term("hidden", "hidden", pair, mapped="hidden" in projections) for pair in pairs]
    if "embedding" in weights:
        terms.append(state_term("embedding", "embedding", LayerPair(0, 0, None), mapped="embedding" in projections))
    output = soft_terms(SOFT, settings.soft, objective, temperature=settings.temperature)
    return Method(
        weights={**weights, **output.weights},
        layer_terms=terms,
        token_terms=output.token_terms,
        sequence_terms=output.sequence_terms,
        shift=causal,
        projections=projections,
    )
