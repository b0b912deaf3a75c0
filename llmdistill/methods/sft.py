"""Supervised fine-tuning: the loss on the labels alone, without a teacher."""

from __future__ import annotations

from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry
from llmdistill.methods.output import label_terms
from llmdistill.models.families import is_causal
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


def make_sft(*, causal: bool = True, objective: Objective = TOKENS) -> Method:
    """Cross-entropy on the labels, or squared error on scores: the baseline for every distillation.

    A decoder predicts the next token (causal), an encoder the masked tokens. The terms are `label` for tokens and
    `sequence_label` for sequences.
    """
    return Method(**vars(label_terms(1.0, objective)), shift=causal)


def build_sft(
    settings: None, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build sft for a student, from its config; the method needs nothing from the teacher."""
    return make_sft(causal=is_causal(student), objective=objective)


def build_untrained(
    settings: None, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    """Build the method that scores an untrained student: sft, or the pooling of embeddings, which have no labels."""
    if objective.pooling is not None:
        return Method({}, shift=is_causal(student), pooling=objective.pooling)
    return build_sft(settings, teacher, student, objective)


SFT = MethodEntry(
    label="SFT",
    help="cross-entropy of the labels, without a teacher",
    build=build_sft,
    needs_teacher=False,
    uses_output=True,
)
SEQKD = MethodEntry(
    label="SeqKD",
    help="sft on answers that the teacher wrote (data.train is what `llmdistill generate` made)",
    build=build_sft,
    needs_teacher=False,
    teacher_writes=True,
)
UNTRAINED = MethodEntry(
    label="untrained", help="no training, only scores", build=build_untrained, needs_teacher=False, trains=False
)
