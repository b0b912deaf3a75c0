"""MiniLM: deep self-attention distillation, the last layer's attention and the relations between its values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from torch import Tensor
from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest, Taps
from llmdistill.config import MinilmConfig
from llmdistill.losses.attention import attention_kl
from llmdistill.losses.matrix import matrix_mse
from llmdistill.losses.relation import RelationInputs, relation_kl, repeat_heads, side_by_side
from llmdistill.methods.layer_map import (
    LayerPair,
    attention_of,
    check_heads,
    named_layer,
    pair_layers,
    same_direction,
    sum_over_layers,
    uniform_map,
)
from llmdistill.models.families import shape_of

TERMS: dict[str, tuple[Aspect, ...]] = {
    "attention": ("query", "key"),
    "value_relation": ("value",),
    "value_mse": ("value",),
}
"""Each term, in the order of the log, and what it taps."""


class Minilm:
    """KL(A^T‖A^S) of the attention (MiniLM §3.1) and KL of the value relations (§3.2), any depth and width.

    The student's last layer learns from one layer of the teacher's, or each of its layers from one (`uniform`, a term
    is then the sum over layers). The MSE of the values is the paper's ablation (Table 6); where they have different
    widths a learnt matrix maps the student's.
    """

    def __init__(self, settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
        """Resolve the settings for two models, from their configs.

        Raises:
            UserError: the models have different numbers of heads, see different things, or lack the layer.
        """
        check_heads(teacher, student, method="minilm")
        self._causal = same_direction(teacher, student, method="minilm")
        self._pairs = _pairs(settings, teacher, student)
        of_student, of_teacher = shape_of(student), shape_of(teacher)
        # Where both models repeat their values alike, so do the relations: their least common number gives the mean.
        self._value_heads = math.lcm(of_student.num_kv_heads, of_teacher.num_kv_heads)
        weights = {name: float(getattr(settings, name)) for name in TERMS}
        self.weights: Mapping[str, float] = {name: weight for name, weight in weights.items() if weight > 0}
        self.positions: Mapping[str, Positions] = {name: "tokens" for name in self.weights}
        aspects = {aspect for name in self.weights for aspect in TERMS[name]}
        self.student_taps: TapRequest = dict.fromkeys(aspects, frozenset(pair.student for pair in self._pairs))
        self.teacher_taps: TapRequest = dict.fromkeys(aspects, frozenset(pair.teacher for pair in self._pairs))
        self.needs_teacher = True
        widths = tuple(shape.num_kv_heads * shape.head_dim for shape in (of_student, of_teacher))
        maps_values = "value_mse" in self.weights and widths[0] != widths[1]
        self.projections: Mapping[Aspect, tuple[int, int]] = {"value": (widths[0], widths[1])} if maps_values else {}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The terms of one batch, unweighted, under the names of `weights`."""
        assert teacher is not None
        losses = {"attention": self._attention, "value_relation": self._value_relation, "value_mse": self._value_mse}
        return {
            name: sum_over_layers(
                [losses[name](student.taps, teacher.taps, pair, batch.attention_mask) for pair in self._pairs]
            )
            for name in self.weights
        }

    def _attention(self, student: Taps, teacher: Taps, pair: LayerPair, mask: Tensor) -> LossSum:
        return attention_kl(
            attention_of(student, pair.student),
            attention_of(teacher, pair.teacher),
            mask,
            causal=self._causal,
            window=pair.window,
            direction="teacher_student",
        )

    def _value_relation(self, student: Taps, teacher: Taps, pair: LayerPair, mask: Tensor) -> LossSum:
        """The mean over attention heads: under grouped-query attention a value head counts once for each that reads it.

        So a student that shares its values among more heads than its teacher can still be compared head by head.
        """
        heads = self._value_heads
        of_student, of_teacher = (
            repeat_heads(value, heads) for value in (student.value[pair.student], teacher.value[pair.teacher])
        )
        return relation_kl(
            RelationInputs(of_student, of_student),
            RelationInputs(of_teacher, of_teacher),
            mask,
            relation_heads=heads,
            causal=self._causal,
            window=pair.window,
        )

    def _value_mse(self, student: Taps, teacher: Taps, pair: LayerPair, mask: Tensor) -> LossSum:
        if "value" in self.projections:
            of_student = student.projected["value"][pair.student]
        else:
            of_student = side_by_side(student.value[pair.student])
        return matrix_mse(of_student, side_by_side(teacher.value[pair.teacher]), mask)


def _pairs(settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig) -> list[LayerPair]:
    depth, of_teacher = shape_of(student).num_layers, shape_of(teacher).num_layers
    if settings.layers == "uniform":
        layers = list(enumerate(uniform_map(depth, of_teacher)))
    else:
        layer: int | Literal["last"] = "last" if settings.teacher_layer is None else settings.teacher_layer
        layers = [(depth - 1, named_layer(layer, teacher, key="minilm.teacher_layer"))]
    return pair_layers(layers, teacher, student, method="minilm")
