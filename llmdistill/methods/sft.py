"""Supervised fine-tuning: the labels alone, no teacher."""

from __future__ import annotations

from collections.abc import Mapping

from llmdistill.batch import Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.losses.logits import label_cross_entropy


class Sft:
    """Cross-entropy on the labels: the baseline that every distillation must beat."""

    def __init__(self, *, causal: bool = True) -> None:
        """A decoder predicts the next token (causal), an encoder the masked one."""
        self._causal = causal
        self.needs_teacher = False
        self.teacher_taps: TapRequest = {}
        self.student_taps: TapRequest = {}
        self.weights: Mapping[str, float] = {"label": 1.0}
        self.positions: Mapping[str, Positions] = {"label": "labels"}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The one term, `label`; the teacher's outputs are not looked at."""
        return {"label": label_cross_entropy(student.logits, batch.labels, shift=self._causal)}
