"""MiniLMv2: multi-head self-attention relations between queries, keys and values, of one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from llmdistill.batch import Aspect
from llmdistill.config.marks import at_least, distinct, replaces
from llmdistill.errors import UserError
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry, check_one_map, check_weights
from llmdistill.methods.layers import check_direction, pair_last_or_mapped, relation_term
from llmdistill.models.families import Shape, shape_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The search for the teacher's layer (MiniLMv2 Figure 2). Each candidate gets a short run of distillation and
    then some steps on the language-modeling labels alone, as when the student is used later; its score is the
    validation loss on data.valid after these steps."""

    layers: str = "all"
    """Candidates: lower, upper, all, or numbers from 1 such as 9-12."""
    steps: int = field(default=1000, metadata=at_least(1))
    """Steps of distillation for each candidate."""
    probe_steps: int = field(default=200, metadata=at_least(1))
    """Steps on the labels (masked tokens for an encoder, next tokens for a decoder) before the score is computed."""


@dataclass(frozen=True, kw_only=True)
class Minilmv2Config:
    """MiniLMv2: relations between queries, keys and values (eq. 5-8).

    Depth, width and number of heads of the models may differ.
    """

    relations: list[Literal["qq", "qk", "qv", "kq", "kk", "kv", "vq", "vk", "vv", "hh"]] = field(
        default_factory=lambda: ["qq", "kk", "vv"], metadata=distinct()
    )
    """The relations to use, each named after its two sides: query, key, value. All have weight 1 (alpha in eq. 5). hh,
    which is not in the paper, relates the layer's outputs, its hidden states."""
    relation_heads: int = field(default=48, metadata=at_least(1))
    """The number of heads that queries, keys and values are split into again; it must divide the widths of what is
    related in both models (of grouped queries that of the keys and values). The paper takes 48 for base-size and 64 for
    large teachers."""
    teacher_layer: int | Literal["last", "auto"] = field(
        default="last", metadata=replaces("minilmv2.teacher_layers", unless=("last",))
    )
    """The teacher's layer, counted from 1, or auto to search for it. The paper takes the last of 12 layers; of 24
    layers the 21st for BERT, the 19th for RoBERTa and XLM-R."""
    teacher_layers: str | None = field(default=None, metadata=replaces("minilmv2.teacher_layer"))
    """Layer to layer: the teacher's layer for each layer of the student, uniform, spread, first, last, or a number for
    each, such as 2,4,6, with 0 for a layer that learns from none. Default: only the last layer learns, from
    teacher_layer."""
    weight: float = 1.0
    """Weight of each relation."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The search, if teacher_layer is auto."""

    def __post_init__(self) -> None:
        """Raises ValueError without a weight, or if both teacher_layer and teacher_layers are set."""
        check_weights("minilmv2", self, ("weight",))
        check_one_map("minilmv2", self.teacher_layer, self.teacher_layers)


SIDES: dict[str, Aspect] = {"q": "query", "k": "key", "v": "value", "h": "hidden"}
"""The letters in the names of relations."""

Sides = tuple[Aspect, Aspect]


def build_minilmv2(
    settings: Minilmv2Config, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build KL(R^T‖R^S) of each chosen relation (MiniLMv2 eq. 5); the models' depth, width and heads may differ.

    The student's last layer learns from one layer of the teacher, or each layer of the student learns from one, as
    `teacher_layers` maps them (a term is then the sum over layers). A search for the layer must
    come before. The weight of each relation is α_ij times one common factor. The method never uses the logits,
    whatever the objective is.
    """
    if settings.teacher_layer == "auto":
        raise UserError("minilmv2.teacher_layer is auto, which only a run on a text searches for: name a layer")
    causal = check_direction(teacher, student, method="minilmv2")
    relations = {f"relation_{left}{right}": (SIDES[left], SIDES[right]) for left, right in settings.relations}
    teacher_widths, student_widths = (
        sorted({_compute_width(shape_of(config), sides) for sides in relations.values()})
        for config in (teacher, student)
    )
    # What divides all widths divides their greatest common divisor.
    common = math.gcd(*teacher_widths, *student_widths)
    if common % settings.relation_heads != 0:
        divisors = [number for number in range(1, common + 1) if common % number == 0]
        raise UserError(
            f"minilmv2.relation_heads is {settings.relation_heads}: it must divide the width of what is related, "
            f"{', '.join(map(str, teacher_widths))} in the teacher and {', '.join(map(str, student_widths))} in the "
            f"student; give one of {', '.join(map(str, divisors))}"
        )
    pairs = pair_last_or_mapped(settings.teacher_layer, settings.teacher_layers, teacher, student, method="minilmv2")
    # A relation has a term for each pair of layers, under one name: they share its weight, and the step adds them up.
    return Method(
        weights=dict.fromkeys(relations, settings.weight),
        layer_terms=[
            relation_term(name, sides, pair, settings.relation_heads, causal=causal)
            for name, sides in relations.items()
            for pair in pairs
        ],
        shift=causal,
    )


def _compute_width(shape: Shape, sides: Sides) -> int:
    """Return the width of both sides after the side with fewer heads is repeated."""
    if "hidden" in sides:
        return shape.hidden_size
    if sides == ("value", "value"):
        return shape.value_dim * shape.num_kv_heads
    # Grouped keys or values meet queries only after they are repeated to the number of query heads.
    return shape.head_dim * (shape.num_heads if "query" in sides else shape.num_kv_heads)


MINILMV2 = MethodEntry(
    label="MiniLMv2",
    help="relations between queries, keys and values of one layer",
    settings=Minilmv2Config,
    build=build_minilmv2,
    searches_layer=True,
)
