"""MiniLM: distills the self-attention of the last layer, its attention and the relations between its values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from llmdistill import losses
from llmdistill.batch import Mapped
from llmdistill.config.marks import replaces
from llmdistill.errors import UserError
from llmdistill.methods import layers
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry, check_one_map, check_weights
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method

_TERMS = ("attention", "value_relation", "value_mse", "hidden_relation", "hidden_mse")
"""All terms, in the order of the log. The weight of each term is a setting of the same name."""


@dataclass(frozen=True, kw_only=True)
class MinilmConfig:
    """MiniLM: attention and value relation of one layer (§3.1, §3.2).

    Teacher and student need the same number of heads; their depth and width may differ. Weight 0 drops a term.
    """

    attention: float = 1.0
    """Weight of KL(A_teacher || A_student) (L_AT)."""
    value_relation: float = 1.0
    """Weight of the KL between the value relations (L_VR)."""
    value_mse: float = 0.0
    """Weight of the MSE of the values, with a learned matrix between them if the widths differ (MiniLM Table 6)."""
    hidden_relation: float = 0.0
    """Weight of the KL between the relations of the hidden states, the layers' outputs, which are cut into as many
    parts as there are heads (tried in MiniLM's first arXiv version, §4.4, which gives no figures)."""
    hidden_mse: float = 0.0
    """Weight of the MSE of the hidden states, with a learned matrix between them if the widths differ (MiniLM §4.2.3:
    transferring hidden states)."""
    teacher_layer: int | Literal["last"] = field(
        default="last", metadata=replaces("minilm.teacher_layers", unless=("last",))
    )
    """The teacher's layer that the student's last layer learns from, counted from 1 (MiniLMv2 Table 4)."""
    teacher_layers: str | None = field(default=None, metadata=replaces("minilm.teacher_layer"))
    """Layer to layer (MiniLM Table 7: uniform): the teacher's layer for each layer of the student, uniform, spread,
    first, last, or a number for each, such as 2,4,6, with 0 for a layer that learns from none. Default: only the last
    layer learns, from teacher_layer."""
    scale: layers.Scale = "token"
    """What the squared errors of value_mse and hidden_mse are divided by. token: the mean square of the teacher's
    features at that token; plain: nothing, as in the paper."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight is out of its range, or both teacher_layer and teacher_layers are set."""
        check_weights("minilm", self, _TERMS)
        check_one_map("minilm", self.teacher_layer, self.teacher_layers)


def build_minilm(
    settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build KL(A^T‖A^S) of the attention (MiniLM §3.1) and KL of the value relations (§3.2), any depth and width.

    The student's last layer learns from one layer of the teacher, or each layer of the student learns from one, as
    `teacher_layers` maps them (a term is then the sum over layers). The MSE of the values (Table 6) and the terms on
    hidden states (§4.2.3, and §4.4 of the first arXiv version) are ablations in the paper; if widths differ, a learned
    matrix maps the student's. The method never uses the logits, whatever the objective is.
    """
    layers.check_heads(teacher, student, method="minilm")
    causal = layers.check_direction(teacher, student, method="minilm")
    layers.check_scores(settings.attention, teacher, student, method="minilm")
    student_shape, teacher_shape = shape_of(student), shape_of(teacher)
    # All value heads side by side.
    widths = student_shape.num_kv_heads * student_shape.value_dim, teacher_shape.num_kv_heads * teacher_shape.value_dim
    hidden_widths = student_shape.hidden_size, teacher_shape.hidden_size
    indivisible = next((width for width in hidden_widths if width % student_shape.num_heads != 0), None)
    if settings.hidden_relation > 0 and indivisible is not None:
        raise UserError(
            f"minilm.hidden_relation cuts hidden states into one part for each of the {student_shape.num_heads} heads, "
            f"which do not divide a width of {indivisible}: set it to 0, or take method minilmv2 with relations hh"
        )
    projections: dict[Mapped, tuple[int, int]] = {}
    if settings.value_mse > 0 and widths[0] != widths[1]:
        projections["value"] = widths
    if settings.hidden_mse > 0 and hidden_widths[0] != hidden_widths[1]:
        projections["hidden"] = hidden_widths
    # If both models repeat their values by a common factor, the relations repeat too: the least common number of heads
    # gives the same mean.
    heads = math.lcm(student_shape.num_kv_heads, teacher_shape.num_kv_heads)
    pairs = layers.pair_last_or_mapped(
        settings.teacher_layer, settings.teacher_layers, teacher, student, method="minilm"
    )
    attention_kl = partial(losses.attention_kl, direction="teacher_student")
    relation, mse = partial(layers.relation_term, causal=causal), partial(layers.mse_term, scale=settings.scale)
    terms = [
        *(layers.attention_term(pair, attention_kl, causal=causal) for pair in pairs),
        # In grouped-query attention a value head counts for each head that uses it: the mean is over attention heads.
        *(relation("value_relation", ("value", "value"), pair, heads, repeated=True) for pair in pairs),
        *(mse("value", pair, name="value_mse", mapped="value" in projections, heads_differ=True) for pair in pairs),
        *(relation("hidden_relation", ("hidden", "hidden"), pair, student_shape.num_heads) for pair in pairs),
        *(mse("hidden", pair, name="hidden_mse", mapped="hidden" in projections) for pair in pairs),
    ]
    return Method(**vars(layers.weigh(settings, terms)), shift=causal, projections=projections)


MINILM = MethodEntry(
    label="MiniLM", help="attention and value relation of one layer", settings=MinilmConfig, build=build_minilm
)
