"""MiniLM: distils the self-attention of the last layer, that is, its attention and the relations between its values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from llmdistill import losses
from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods import layers
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.methods.entry import MethodEntry, check_settings
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
        """Raises ValueError if a weight is out of its range, or teacher_layer is set but layers does not allow it."""
        check_settings("minilm", self, ("attention", "value_relation", "value_mse"))
        if self.teacher_layer is not None and self.layers == "uniform":
            raise ValueError(
                "minilm.teacher_layer names one layer, but minilm.layers is uniform: leave one of them out"
            )


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
    layers.check_heads(teacher, student, method="minilm")
    causal = layers.same_direction(teacher, student, method="minilm")
    of_student, of_teacher = shape_of(student), shape_of(teacher)
    widths = of_student.num_kv_heads * of_student.head_dim, of_teacher.num_kv_heads * of_teacher.head_dim
    maps_values = settings.value_mse > 0 and widths[0] != widths[1]
    # If both models repeat their values by a common factor, the relations repeat too: the least common number of heads
    # gives the same mean.
    heads = math.lcm(of_student.num_kv_heads, of_teacher.num_kv_heads)
    pairs = _pairs(settings, teacher, student)
    attention_kl = partial(losses.attention_kl, direction="teacher_student")
    terms = [
        *(layers.attention_term(pair, attention_kl, causal=causal) for pair in pairs),
        *(_value_relation(pair, heads=heads, causal=causal) for pair in pairs),
        *(_value_mse(pair, mapped=maps_values) for pair in pairs),
    ]
    projections: dict[Aspect, tuple[int, int]] = {"value": widths} if maps_values else {}
    return Method(**vars(layers.weighted(settings, terms)), shift=causal, projections=projections)


def _value_relation(pair: layers.LayerPair, *, heads: int, causal: bool) -> LayerTerm:
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
            horizon=teacher.horizon,
        )

    return layers.layer_term("value_relation", pair, loss, "value")


def _value_mse(pair: layers.LayerPair, *, mapped: bool) -> LayerTerm:
    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        layer = pair.student
        of_student = student.projected["value"][layer] if mapped else losses.side_by_side(student.value[layer])
        return losses.matrix_mse(of_student, losses.side_by_side(teacher.value[pair.teacher]), mask)

    return layers.layer_term("value_mse", pair, loss, "value")


def _pairs(settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig) -> list[layers.LayerPair]:
    depth, of_teacher = shape_of(student).num_layers, shape_of(teacher).num_layers
    if settings.layers == "uniform":
        numbers = list(enumerate(layers.uniform_map(depth, of_teacher)))
    else:
        layer: int | Literal["last"] = "last" if settings.teacher_layer is None else settings.teacher_layer
        numbers = [(depth - 1, layers.named_layer(layer, teacher, key="minilm.teacher_layer"))]
    return layers.pair_layers(numbers, teacher, student, method="minilm")


MINILM = MethodEntry(
    label="MiniLM", help="attention and value relation of one layer", settings=MinilmConfig, build=build_minilm
)
