"""MiniLM: deep self-attention distillation, the last layer's attention and the relations between its values."""

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
    """MiniLM: the attention and the value relation of one layer (MiniLM §3.1, §3.2). Teacher and student need the same
    number of heads; depth and width are free. A weight of 0 drops the term."""

    attention: float = 1.0
    """Weight of KL(A_teacher || A_student) (L_AT)."""
    value_relation: float = 1.0
    """Weight of the KL between the value relations (L_VR)."""
    value_mse: float = 0.0
    """Weight of the MSE of the values, a learnt matrix in between where the widths differ (MiniLM Table 6)."""
    layers: Literal["last", "uniform"] = "last"
    """last: the last layer alone; uniform: every layer of the student against one of the teacher's, evenly spread
    (layer-to-layer, MiniLM Table 7)."""
    teacher_layer: int | None = None
    """The teacher's layer, from 1, where layers is last; without it the last (MiniLMv2 Table 4 takes another)."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a negative weight, none at all, or a layer that layers rules out.
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
"""Each term, in the order of the log, and what it taps."""


def build_minilm(
    settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """KL(A^T‖A^S) of the attention (MiniLM §3.1) and KL of the value relations (§3.2), any depth and width.

    The student's last layer learns from one layer of the teacher's, or each of its layers from one (`uniform`, a term
    is then the sum over layers). The MSE of the values is the paper's ablation (Table 6); where they have different
    widths a learnt matrix maps the student's. The output is never looked at, whatever the objective.

    Raises:
        UserError: the models have different numbers of heads, see different things, or lack the layer.
    """
    check_heads(teacher, student, method="minilm")
    causal = same_direction(teacher, student, method="minilm")
    of_student, of_teacher = shape_of(student), shape_of(teacher)
    widths = tuple(shape.num_kv_heads * shape.head_dim for shape in (of_student, of_teacher))
    maps_values = settings.value_mse > 0 and widths[0] != widths[1]
    loss_of: dict[str, Callable[[LayerPair], Loss]] = {
        "attention": partial(_attention, causal=causal),
        # Where both models repeat their values alike, so do the relations: their least common number gives the mean.
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
    """The mean over attention heads: under grouped-query attention a value head counts once for each that reads it.

    So a student that shares its values among more heads than its teacher can still be compared head by head.
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
