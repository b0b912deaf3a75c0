"""DistilBERT (Sanh et al. 2019): soft targets, labels, and the cosine between the last hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmdistill import losses
from llmdistill.batch import LossSum, Taps
from llmdistill.config.marks import OVER_0
from llmdistill.errors import UserError
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.methods.entry import MethodEntry, check_weights
from llmdistill.methods.layers import LayerPair, check_direction, layer_term, weigh
from llmdistill.methods.output import SoftPositions, divergence_terms, label_terms, positions_of
from llmdistill.models.families import shape_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


@dataclass(frozen=True, kw_only=True)
class DistilbertConfig:
    """The triple loss of DistilBERT (Sanh et al. 2019). A weight of 0 drops the term."""

    # The defaults are those of the authors' command (examples of transformers, research_projects/distillation).
    soft: float = 5.0
    """Weight of KL(T||S) between the softened outputs, times the squared temperature."""
    label: float = 2.0
    """Weight of the cross-entropy on the labels (the masked tokens)."""
    cosine: float = 1.0
    """Weight of 1 - cos between the last hidden states; teacher and student must have the same width."""
    temperature: float = field(default=2.0, metadata=OVER_0)
    """Temperature that softens both distributions."""
    positions: SoftPositions = "all"
    """Tokens of an encoder at which the soft term is computed: all real tokens, as its authors' distiller does by
    default, or only the masked ones. A decoder's are always those of the answers."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight or the temperature is out of its range."""
        check_weights("distilbert", self, ("soft", "label", "cosine"))


def build_distilbert(
    settings: DistilbertConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build the triple loss: t²·KL(T‖S), cross-entropy on the labels, 1 - cos between the last hidden states."""
    causal = check_direction(teacher, student, method="distilbert")
    student_shape, teacher_shape = shape_of(student), shape_of(teacher)
    if settings.cosine > 0 and student_shape.hidden_size != teacher_shape.hidden_size:
        raise UserError(
            f"distilbert.cosine compares hidden states, but they are {teacher_shape.hidden_size} wide in the teacher "
            f"and {student_shape.hidden_size} in the student: set distilbert.cosine to 0, or give the student the "
            "teacher's width"
        )
    # The last layers, whose outputs can be compared whatever their attention windows are.
    pair = LayerPair(student_shape.num_layers - 1, teacher_shape.num_layers - 1, None)

    def cosine(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        return losses.hidden_cosine(student.hidden[pair.student], teacher.hidden[pair.teacher], mask)

    positions = positions_of(settings.positions, causal=causal)
    soft = losses.TokenTerm("soft", losses.FORWARD_KL, settings.temperature, positions=positions)
    terms = (
        divergence_terms(soft, settings.soft, objective)
        | label_terms(settings.label, objective)
        | weigh(settings, [layer_term("cosine", pair, cosine, "hidden")])
    )
    return Method(**vars(terms), shift=causal)


DISTILBERT = MethodEntry(
    label="DistilBERT",
    help="the softened output, the labels, and the last hidden states",
    settings=DistilbertConfig,
    build=build_distilbert,
    uses_output=True,
)
