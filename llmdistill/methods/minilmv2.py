"""MiniLMv2: multi-head self-attention relations between queries, keys and values, of one layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest, Taps
from llmdistill.config import Minilmv2Config
from llmdistill.errors import UserError
from llmdistill.losses.relation import RelationInputs, relation_kl
from llmdistill.methods.layer_map import named_layer, pair_layers, same_direction
from llmdistill.models.families import Shape, shape_of

SIDES: dict[str, Aspect] = {"q": "query", "k": "key", "v": "value"}
"""The letters that a relation is named by."""


class Minilmv2:
    """KL(R^T‖R^S) of each chosen relation (MiniLMv2 eq. 5); depth, width and number of heads are free.

    The student's last layer learns from one layer of the teacher's. The weight of each relation is α_ij times one
    common factor.
    """

    def __init__(self, settings: Minilmv2Config, teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
        """Resolve the settings for two models, from their configs; a layer to be searched for must be found before.

        Raises:
            UserError: the relation heads do not divide a width, the models see different things, or lack the layer.
        """
        assert settings.teacher_layer != "auto", "the search for the teacher's layer comes first"
        self._causal = same_direction(teacher, student, method="minilmv2")
        self._relation_heads = settings.relation_heads
        self._relations = {f"relation_{relation}": _sides(relation) for relation in settings.relations}
        self._check_relation_heads(shape_of(teacher), shape_of(student))
        layer = named_layer(settings.teacher_layer, teacher, key="minilmv2.teacher_layer")
        last = shape_of(student).num_layers - 1
        (self._pair,) = pair_layers([(last, layer)], teacher, student, method="minilmv2")
        self.weights: Mapping[str, float] = dict.fromkeys(self._relations, settings.weight)
        self.positions: Mapping[str, Positions] = {name: "tokens" for name in self.weights}
        aspects = {aspect for sides in self._relations.values() for aspect in sides}
        self.student_taps: TapRequest = dict.fromkeys(aspects, frozenset({last}))
        self.teacher_taps: TapRequest = dict.fromkeys(aspects, frozenset({layer}))
        self.needs_teacher = True
        self.projections: Mapping[Aspect, tuple[int, int]] = {}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The relations' terms of one batch, unweighted."""
        assert teacher is not None
        return {
            name: relation_kl(
                _inputs(student.taps, self._pair.student, sides),
                _inputs(teacher.taps, self._pair.teacher, sides),
                batch.attention_mask,
                relation_heads=self._relation_heads,
                causal=self._causal,
                window=self._pair.window,
            )
            for name, sides in self._relations.items()
        }

    def _check_relation_heads(self, teacher: Shape, student: Shape) -> None:
        of_teacher, of_student = (
            sorted({_width(shape, sides) for sides in self._relations.values()}) for shape in (teacher, student)
        )
        common = math.gcd(*of_teacher, *of_student)
        if common % self._relation_heads != 0:
            divisors = [number for number in range(1, common + 1) if common % number == 0]
            raise UserError(
                f"minilmv2.relation_heads is {self._relation_heads}: it must divide the width of what is related, "
                f"{_listed(of_teacher)} in the teacher and {_listed(of_student)} in the student; give one of "
                f"{_listed(divisors)}"
            )


def _sides(relation: str) -> tuple[Aspect, Aspect]:
    return SIDES[relation[0]], SIDES[relation[1]]


def _inputs(taps: Taps, layer: int, sides: tuple[Aspect, Aspect]) -> RelationInputs:
    left, right = (getattr(taps, aspect)[layer] for aspect in sides)
    return RelationInputs(left, right)


def _width(shape: Shape, sides: tuple[Aspect, Aspect]) -> int:
    """How wide both sides are once those with fewer heads are repeated."""
    return shape.head_dim * (shape.num_heads if "query" in sides else shape.num_kv_heads)


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
