"""MaKD: multi-aspect knowledge distillation, each layer of the student against the same layer of the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from llmdistill import losses
from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.errors import UserError
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.methods.layer_map import LayerPair, attention_of, check_same_shape, layer_term
from llmdistill.methods.method import Method
from llmdistill.methods.objective import LOGITS
from llmdistill.methods.output import label_terms, soft_terms
from llmdistill.methods.partition import parse_layers
from llmdistill.models.families import family_of, shape_of
from llmdistill.objective import TOKENS, Objective


@dataclass(frozen=True, kw_only=True)
class MakdConfig:
    """The terms of MaKD (eq. 12-19), their layers and their weights. A weight of 0 drops the term."""

    matrix_layers: str = "lower"
    """Layers of the matrix losses: lower, upper, all, none, or numbers from 1 such as 1-3,6."""
    layer_layers: str = "upper"
    """Layers of the attention and hidden-state losses, in the same notation."""
    query: float = 1.0
    """Weight of the queries' MSE (eq. 15)."""
    key: float = 1.0
    """Weight of the keys' MSE (eq. 15)."""
    value: float = 1.0
    """Weight of the values' MSE (eq. 15)."""
    ffn_up: float = 1.0
    """Weight of the MSE of the up projection's output (eq. 16)."""
    ffn_gate: float = 1.0
    """Weight of the MSE of the gate projection's output, in models that have one (eq. 16)."""
    ffn_down: float = 1.0
    """Weight of the MSE of the down projection's output (eq. 16)."""
    attention: float = 1.0
    """Weight of KL(A_student || A_teacher) (eq. 12)."""
    hidden: float = 1.0
    """Weight of the MSE of the layers' outputs (eq. 13)."""
    logits: float = 1.0
    """Weight of the soft cross-entropy on the logits (eq. 18)."""
    label: float = 0.0
    """Weight of the cross-entropy on the labels (not in the paper)."""
    temperature: float = 1.0
    """Temperature of the soft cross-entropy (t in eq. 18)."""
    normalize_mse: bool = False
    """Divide each MSE by the variance of the teacher's features at that token."""


MATRIX_TERMS: tuple[Aspect, ...] = ("query", "key", "value", "ffn_up", "ffn_gate", "ffn_down")
"""Terms of the matrix aspect (eq. 17), each with the name of its tap."""

LAYER_TERMS = ("attention", "hidden")
"""Terms of the layer aspect (eq. 14)."""

TERMS = (*MATRIX_TERMS, *LAYER_TERMS, "logits", "label")
"""All terms, in the order of the log. The weight of each term is a setting of the same name."""


def make_makd(
    settings: MakdConfig,
    num_layers: int,
    *,
    causal: bool,
    gated: bool,
    windows: Sequence[int | None] | None = None,
    objective: Objective = TOKENS,
) -> Method:
    """The loss of MaKD (eq. 19): matrix terms in some layers, attention and hidden states in others, and logits.

    A term is the sum over its layers of the mean over tokens, so it grows with the number of layers. A term with weight
    0 or without layers is left out: it is not in the weights, is not computed, and requests no taps. If sequences have
    targets, logits and label have a counterpart of the same weight for them (sequence_logits, sequence_label).

    Args:
        settings: terms, layers, weights.
        num_layers: the number of layers of the teacher and of the student.
        causal: whether the models are decoders; if not, they are encoders.
        gated: whether the feed-forward layers have a gate; without a gate the term ffn_gate is left out.
        windows: the sliding attention window of each layer, None for a layer without one; None if no layer has one.
        objective: the targets that the batches have.

    Raises:
        UserError: a layer does not exist, a weight is negative, a temperature is 0, or no term is left.
    """
    check_settings(settings)
    windows = (None,) * num_layers if windows is None else windows
    matrix_layers = parse_layers(settings.matrix_layers, num_layers, key="makd.matrix_layers")
    layer_layers = parse_layers(settings.layer_layers, num_layers, key="makd.layer_layers")
    terms: list[LayerTerm] = []
    for name in (*MATRIX_TERMS, *LAYER_TERMS):
        if getattr(settings, name) > 0 and (gated or name != "ffn_gate"):
            layers = matrix_layers if name in MATRIX_TERMS else layer_layers
            terms += [_layer_term(name, layer, settings, causal=causal, window=windows[layer]) for layer in layers]
    output = soft_terms(LOGITS, settings.logits, objective, temperature=settings.temperature)
    output = output | label_terms(settings.label, objective)
    weights = {**{term.name: getattr(settings, term.name) for term in terms}, **output.weights}
    if not weights:
        raise UserError("makd: no term is left to train with: give one a weight over 0, and layers to act in")
    return Method(
        weights=weights,
        layer_terms=terms,
        token_terms=output.token_terms,
        sequence_terms=output.sequence_terms,
        shift=causal,
    )


def check_settings(settings: MakdConfig) -> None:
    """Check the weights and the temperature.

    Raises:
        UserError: a weight is negative, or the temperature is not positive.
    """
    for name in TERMS:
        if getattr(settings, name) < 0:
            raise UserError(f"makd.{name} is {getattr(settings, name)}: a weight is 0 (the term is off) or more")
    if settings.temperature <= 0:
        raise UserError(f"makd.temperature is {settings.temperature}: give a number over 0, 1 as in the paper")


def _layer_term(name: str, layer: int, settings: MakdConfig, *, causal: bool, window: int | None) -> LayerTerm:
    """One term in one layer of both models."""
    normalize = settings.normalize_mse

    def attention(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        of_student, of_teacher = attention_of(student, layer), attention_of(teacher, layer)
        return losses.attention_kl(of_student, of_teacher, mask, causal=causal, window=window)

    def hidden(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        return losses.hidden_mse(student.hidden[layer], teacher.hidden[layer], mask, normalize=normalize)

    def matrix(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        return losses.matrix_mse(
            getattr(student, name)[layer], getattr(teacher, name)[layer], mask, normalize=normalize
        )

    pair = LayerPair(layer, layer, window)
    if name == "attention":
        return layer_term(name, ("query", "key"), pair, attention)
    return layer_term(name, (cast(Aspect, name),), pair, hidden if name == "hidden" else matrix)


def build_makd(
    settings: MakdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build MaKD for two models, from their configs.

    Raises:
        UserError: the sizes of the models differ, or the settings do not fit the models.
    """
    check_same_shape(teacher, student, method="makd")
    family, shape = family_of(student), shape_of(student)
    return make_makd(
        settings,
        shape.num_layers,
        causal=family.causal,
        gated=family.ffn_gate is not None,
        windows=shape.windows,
        objective=objective,
    )
