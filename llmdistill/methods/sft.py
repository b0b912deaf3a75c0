"""Supervised fine-tuning: the labels alone, no teacher."""

from __future__ import annotations

from llmdistill.methods.method import Method
from llmdistill.methods.output import label_terms
from llmdistill.objective import TOKENS, Objective


def make_sft(*, causal: bool = True, objective: Objective = TOKENS) -> Method:
    """Cross-entropy on the labels, or squared error on scores: the baseline that every distillation must beat.

    A decoder predicts the next token (causal), an encoder the masked one. The terms are `label` on words and
    `sequence_label` on sequences.
    """
    return Method(**label_terms(1.0, objective)._asdict(), shift=causal)
