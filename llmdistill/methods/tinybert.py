"""TinyBERT (Jiao et al. 2020): loss on embedding, attention scores, evenly spread hidden states, and logits."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmdistill import losses
from llmdistill.batch import Aspect, Mapped
from llmdistill.config.marks import OVER_0
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods import layers
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry, check_weights
from llmdistill.methods.output import soft_terms
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


@dataclass(frozen=True, kw_only=True)
class TinybertConfig:
    """TinyBERT: embedding, attention and hidden states (Jiao et al. 2020, eq. 7-9).

    The teacher's layers are evenly spread over the student's. Learned matrices map the student's width to the
    teacher's. Weight 0 drops a term.
    """

    teacher_layers: str = "uniform"
    """The teacher's layer for each layer of the student: uniform (layer m of M learns from m·L/M of L, 2, 4, 6 for 3
    of 6), spread (1, 3, 5), first, last, or a number for each, such as 2,4,6, with 0 for a layer that learns from
    none."""

    attention: float = 1.0
    """Weight of the MSE of the attention scores before the softmax; both models need the same number of heads."""
    hidden: float = 1.0
    """Weight of the MSE of the layers' outputs."""
    embedding: float = 1.0
    """Weight of the MSE of the embedding's output."""
    soft: float = 0.0
    """Weight of the soft cross-entropy on the logits (eq. 10): for a task, not for general distillation."""
    temperature: float = field(default=1.0, metadata=OVER_0)
    """Temperature of the soft cross-entropy."""
    scale: layers.Scale = "token"
    """What the squared errors of hidden states and embedding are divided by. token: the mean square of the teacher's
    features at that token; plain: nothing, as in the paper."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight or the temperature is out of its range."""
        check_weights("tinybert", self, ("attention", "hidden", "embedding", "soft"))


def build_tinybert(
    settings: TinybertConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build MSE of attention scores (eq. 7), hidden states (eq. 8), embedding (eq. 9); soft cross-entropy (eq. 10).

    Layer m of the student learns from layer m·L/M of the teacher, or as `teacher_layers` says; a term is the sum over
    the student's layers (eq. 11).
    If the widths differ, one learned matrix maps the hidden states of all layers, and another maps the embedding.
    """
    causal = layers.check_direction(teacher, student, method="tinybert")
    layers.check_scores(settings.attention, teacher, student, method="tinybert")
    student_shape, teacher_shape = shape_of(student), shape_of(teacher)
    numbers = layers.map_layers(settings.teacher_layers, teacher, student, key="tinybert.teacher_layers")
    widths = student_shape.hidden_size, teacher_shape.hidden_size
    # W_h of eq. 8 and W_e of eq. 9; models of one width are compared without them.
    aspects: tuple[Aspect, ...] = ("hidden", "embedding") if widths[0] != widths[1] else ()
    projections: dict[Mapped, tuple[int, int]] = {aspect: widths for aspect in aspects if getattr(settings, aspect) > 0}
    terms: list[LayerTerm] = []
    if settings.attention > 0:
        layers.check_heads(teacher, student, method="tinybert.attention")
        pairs = layers.pair_layers(numbers, teacher, student, method="tinybert.attention")
        terms += [layers.attention_term(pair, losses.attention_score_mse, causal=causal) for pair in pairs]
    # Hidden states can be compared whatever the attention windows are, so that pairs carry none here.
    pairs = [layers.LayerPair(student_layer, teacher_layer, None) for student_layer, teacher_layer in numbers]
    terms += [layers.mse_term("hidden", pair, scale=settings.scale, mapped="hidden" in projections) for pair in pairs]
    # The embedding is tapped as the input of layer 0 (see `batch.Aspect`).
    embedding = layers.LayerPair(0, 0, None)
    terms.append(layers.mse_term("embedding", embedding, scale=settings.scale, mapped="embedding" in projections))
    output = soft_terms("soft", settings.soft, objective, temperature=settings.temperature)
    return Method(**vars(layers.weigh(settings, terms) | output), shift=causal, projections=projections)


TINYBERT = MethodEntry(
    label="TinyBERT",
    help="embedding, attention scores and hidden states of evenly spread layers",
    settings=TinybertConfig,
    build=build_tinybert,
)
