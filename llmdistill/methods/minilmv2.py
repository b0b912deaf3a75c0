"""MiniLMv2: multi-head self-attention relations between queries, keys and values, of one layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import Tensor
from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.config import Minilmv2Config
from llmdistill.errors import UserError
from llmdistill.losses.relation import RelationInputs, relation_kl
from llmdistill.methods.layer_map import LayerPair, layer_term, named_layer, pair_layers, same_direction
from llmdistill.methods.method import Method
from llmdistill.models.families import Shape, shape_of
from llmdistill.objective import TOKENS, Objective

SIDES: dict[str, Aspect] = {"q": "query", "k": "key", "v": "value"}
"""The letters that a relation is named by."""

Sides = tuple[Aspect, Aspect]


def build_minilmv2(
    settings: Minilmv2Config, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """KL(R^T‖R^S) of each chosen relation (MiniLMv2 eq. 5); depth, width and number of heads are free.

    The student's last layer learns from one layer of the teacher's; one to be searched for must be found before. The
    weight of each relation is α_ij times one common factor. The output is never looked at, whatever the objective.

    Raises:
        UserError: the relation heads do not divide a width, the models see different things, or lack the layer.
    """
    assert settings.teacher_layer != "auto", "the search for the teacher's layer comes first"
    causal = same_direction(teacher, student, method="minilmv2")
    relations = {f"relation_{relation}": _sides(relation) for relation in settings.relations}
    _check_relation_heads(settings.relation_heads, relations.values(), shape_of(teacher), shape_of(student))
    layer = named_layer(settings.teacher_layer, teacher, key="minilmv2.teacher_layer")
    last = shape_of(student).num_layers - 1
    (pair,) = pair_layers([(last, layer)], teacher, student, method="minilmv2")
    return Method(
        weights=dict.fromkeys(relations, settings.weight),
        layer_terms=[
            layer_term(name, sides, pair, _relation(sides, pair, settings.relation_heads, causal))
            for name, sides in relations.items()
        ],
        shift=causal,
    )


def _relation(
    sides: Sides, pair: LayerPair, relation_heads: int, causal: bool
) -> Callable[[Taps, Taps, Tensor], LossSum]:
    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        return relation_kl(
            _inputs(student, pair.student, sides),
            _inputs(teacher, pair.teacher, sides),
            mask,
            relation_heads=relation_heads,
            causal=causal,
            window=pair.window,
        )

    return loss


def _check_relation_heads(relation_heads: int, relations: Iterable[Sides], teacher: Shape, student: Shape) -> None:
    of_teacher, of_student = (sorted({_width(shape, sides) for sides in relations}) for shape in (teacher, student))
    common = math.gcd(*of_teacher, *of_student)
    if common % relation_heads != 0:
        divisors = [number for number in range(1, common + 1) if common % number == 0]
        raise UserError(
            f"minilmv2.relation_heads is {relation_heads}: it must divide the width of what is related, "
            f"{_listed(of_teacher)} in the teacher and {_listed(of_student)} in the student; give one of "
            f"{_listed(divisors)}"
        )


def _sides(relation: str) -> Sides:
    return SIDES[relation[0]], SIDES[relation[1]]


def _inputs(taps: Taps, layer: int, sides: Sides) -> RelationInputs:
    left, right = (getattr(taps, aspect)[layer] for aspect in sides)
    return RelationInputs(left, right)


def _width(shape: Shape, sides: Sides) -> int:
    """How wide both sides are once those with fewer heads are repeated."""
    return shape.head_dim * (shape.num_heads if "query" in sides else shape.num_kv_heads)


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(number) for number in numbers)
