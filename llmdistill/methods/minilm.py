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
from llmdistill.methods.entry import MethodEntry, check_one_map, check_settings
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
    teacher_layer: int | Literal["last"] = "last"
    """The teacher's layer that the student's last layer learns from, counted from 1 (MiniLMv2 Table 4)."""
    teacher_layers: str | None = None
    """Layer to layer (MiniLM Table 7: uniform): the teacher's layer for each layer of the student, uniform, spread,
    first, last, or a number for each, such as 2,4,6, with 0 for a layer that learns from none. Default: only the last
    layer learns, from teacher_layer."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight is out of its range, or both teacher_layer and teacher_layers are set."""
        check_settings("minilm", self, ("attention", "value_relation", "value_mse"))
        check_one_map("minilm", self.teacher_layer, self.teacher_layers)


def build_minilm(
    settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """KL(A^T‖A^S) of the attention (MiniLM §3.1) and KL of the value relations (§3.2), any depth and width.

    The student's last layer learns from one layer of the teacher, or each layer of the student learns from one, as
    `teacher_layers` maps them (a term is then the sum over layers). The MSE of the values is an ablation in the paper
    (Table 6); if the widths of the values differ, a learnt matrix maps the student's values. The method never uses the
    logits, whatever the objective is.

    Raises:
        UserError: the models have different numbers of heads, only one of them is a decoder, the attention windows
            differ, or the layer does not exist or the map of the layers does not fit.
    """
    layers.check_heads(teacher, student, method="minilm")
    causal = layers.same_direction(teacher, student, method="minilm")
    of_student, of_teacher = shape_of(student), shape_of(teacher)
    widths = of_student.num_kv_heads * of_student.head_dim, of_teacher.num_kv_heads * of_teacher.head_dim
    maps_values = settings.value_mse > 0 and widths[0] != widths[1]
    # If both models repeat their values by a common factor, the relations repeat too: the least common number of heads
    # gives the same mean.
    heads = math.lcm(of_student.num_kv_heads, of_teacher.num_kv_heads)
    pairs = layers.last_or_mapped(settings.teacher_layer, settings.teacher_layers, teacher, student, method="minilm")
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


MINILM = MethodEntry(
    label="MiniLM", help="attention and value relation of one layer", settings=MinilmConfig, build=build_minilm
)
