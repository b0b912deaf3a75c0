"""Supervised fine-tuning: the labels alone, no teacher."""

from __future__ import annotations

from collections.abc import Mapping

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.methods.label import label_terms
from llmdistill.methods.objective import LABEL, WORDS, Objective


class Sft:
    """Cross-entropy on the labels, or squared error on scores: the baseline that every distillation must beat."""

    def __init__(self, *, causal: bool = True, objective: Objective = WORDS) -> None:
        """A decoder predicts the next token (causal), an encoder the masked one."""
        self._causal, self._objective = causal, objective
        self.needs_teacher = False
        self.teacher_taps: TapRequest = {}
        self.student_taps: TapRequest = {}
        self.positions: Mapping[str, Positions] = LABEL.positions(objective)
        self.weights: Mapping[str, float] = dict.fromkeys(self.positions, 1.0)
        self.projections: Mapping[Aspect, tuple[int, int]] = {}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """`label` on words and `sequence_label` on sequences; the teacher's outputs are not looked at."""
        return label_terms(student, batch, self._objective, causal=self._causal)
