"""MiniLM: distils the self-attention of the last layer, that is, its attention and the relations between its values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from llmdistill import losses
from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.methods.entry import check_weights
from llmdistill.methods.layer_map import (
    LayerPair,
    attention_of,
    check_heads,
    layer_term,
    named_layer,
    pair_layers,
    same_direction,
    uniform_map,
)
from llmdistill.methods.method import Method
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective


@dataclass(frozen=True, kw_only=True)
class MinilmConfig:
    """MiniLM: the attention and the value relation of one layer (MiniLM §3.1, §3.2). Teacher and student need the
    same number of heads; their depth and width may differ. A weight of 0 drops the term."""

    attention: float = 1.0
    """Weight of KL(A_teacher || A_student) (L_AT)."""
    value_relation: float = 1.0
    """Weight of the KL between the value relations (L_VR)."""
    value_mse: float = 0.0
    """Weight of the MSE of the values, with a learnt matrix between them if the widths differ (MiniLM Table 6)."""
    layers: Literal["last", "uniform"] = "last"
    """last: only the last layer; uniform: every layer of the student learns from one layer of the teacher, evenly
    spread (layer-to-layer, MiniLM Table 7)."""
    teacher_layer: int | None = None
    """The teacher's layer, counted from 1, if layers is last; default: the last layer (MiniLMv2 Table 4: another)."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a weight is negative, all weights are 0, or teacher_layer is set but layers does not allow it.
        """
        check_weights("minilm", self, ("attention", "value_relation", "value_mse"))
        if self.teacher_layer is not None and self.layers == "uniform":
            raise ValueError(
                "minilm.teacher_layer names one layer, but minilm.layers is uniform: leave one of them out"
            )


Loss = Callable[[Taps, Taps, Tensor], LossSum]

TERMS: dict[str, tuple[Aspect, ...]] = {
    "attention": ("query", "key"),
    "value_relation": ("value",),
    "value_mse": ("value",),
}
"""The taps of each term, in the order of the log."""


def build_minilm(
    settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """KL(A^T‖A^S) of the attention (MiniLM §3.1) and KL of the value relations (§3.2), any depth and width.

    The student's last layer learns from one layer of the teacher, or each layer of the student learns from one
    (`uniform`; a term is then the sum over layers). The MSE of the values is an ablation in the paper (Table 6); if the
    widths of the values differ, a learnt matrix maps the student's values. The method never uses the logits, whatever
    the objective is.

    Raises:
        UserError: the models have different numbers of heads, only one of them is a decoder, the attention windows
            differ, or the layer does not exist.
    """
    check_heads(teacher, student, method="minilm")
    causal = same_direction(teacher, student, method="minilm")
    of_student, of_teacher = shape_of(student), shape_of(teacher)
    widths = tuple(shape.num_kv_heads * shape.head_dim for shape in (of_student, of_teacher))
    maps_values = settings.value_mse > 0 and widths[0] != widths[1]
    loss_of: dict[str, Callable[[LayerPair], Loss]] = {
        "attention": partial(_attention, causal=causal),
        # If both models repeat their values by a common factor, the relations repeat too: the least common number of
        # heads gives the same mean.
        "value_relation": partial(
            _value_relation, heads=math.lcm(of_student.num_kv_heads, of_teacher.num_kv_heads), causal=causal
        ),
        "value_mse": partial(_value_mse, mapped=maps_values),
    }
    weights = {name: float(getattr(settings, name)) for name in TERMS if getattr(settings, name) > 0}
    return Method(
        weights=weights,
        layer_terms=[
            layer_term(name, TERMS[name], pair, loss_of[name](pair))
            for name in weights
            for pair in _pairs(settings, teacher, student)
        ],
        shift=causal,
        projections={"value": (widths[0], widths[1])} if maps_values else {},
    )


def _attention(pair: LayerPair, *, causal: bool) -> Loss:
    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        return losses.attention_kl(
            attention_of(student, pair.student),
            attention_of(teacher, pair.teacher),
            mask,
            causal=causal,
            window=pair.window,
            direction="teacher_student",
        )

    return loss


def _value_relation(pair: LayerPair, *, heads: int, causal: bool) -> Loss:
    """The mean over attention heads; in grouped-query attention a value head counts for each head that uses it.

    So the heads can be compared one by one even if the student shares its values among more attention heads than its
    teacher.
    """

    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        of_student, of_teacher = (
            losses.repeat_heads(value, heads) for value in (student.value[pair.student], teacher.value[pair.teacher])
        )
        return losses.relation_kl(
            losses.RelationInputs(of_student, of_student),
            losses.RelationInputs(of_teacher, of_teacher),
            mask,
            relation_heads=heads,
            causal=causal,
            window=pair.window,
        )

    return loss


def _value_mse(pair: LayerPair, *, mapped: bool) -> Loss:
    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        layer = pair.student
        of_student = student.projected["value"][layer] if mapped else losses.side_by_side(student.value[layer])
        return losses.matrix_mse(of_student, losses.side_by_side(teacher.value[pair.teacher]), mask)

    return loss


def _pairs(settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig) -> list[LayerPair]:
    depth, of_teacher = shape_of(student).num_layers, shape_of(teacher).num_layers
    if settings.layers == "uniform":
        layers = list(enumerate(uniform_map(depth, of_teacher)))
    else:
        layer: int | Literal["last"] = "last" if settings.teacher_layer is None else settings.teacher_layer
        layers = [(depth - 1, named_layer(layer, teacher, key="minilm.teacher_layer"))]
    return pair_layers(layers, teacher, student, method="minilm")
