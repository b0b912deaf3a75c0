"""DistilBERT (Sanh et al. 2019): the softened output, the labels, and the angle between the last hidden states."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.config import DistilbertConfig
from llmdistill.errors import UserError
from llmdistill.losses.divergence import forward_kl
from llmdistill.losses.hidden import hidden_cosine
from llmdistill.methods.label import label_terms
from llmdistill.methods.layer_map import same_direction
from llmdistill.methods.objective import LABEL, WORDS, Objective, OutputTerm
from llmdistill.methods.output import divergence_terms
from llmdistill.models.families import shape_of

SOFT = OutputTerm("soft", "sequence_soft")
"""KL(T‖S) of the softened output."""


class Distilbert:
    """The triple loss: t²·KL(T‖S) of the output, cross-entropy on the labels, 1 - cos of the last layers' outputs."""

    def __init__(
        self,
        settings: DistilbertConfig,
        teacher: PreTrainedConfig,
        student: PreTrainedConfig,
        objective: Objective = WORDS,
    ) -> None:
        """Resolve the settings for two models, from their configs.

        Raises:
            UserError: one model is a decoder and the other an encoder, or their widths differ under the cosine loss.
        """
        self._settings, self._objective = settings, objective
        self._causal = same_direction(teacher, student, method="distilbert")
        of_student, of_teacher = shape_of(student), shape_of(teacher)
        self._student_layer, self._teacher_layer = of_student.num_layers - 1, of_teacher.num_layers - 1
        weights, positions = _terms(settings, objective)
        self.weights: Mapping[str, float] = weights
        self.positions: Mapping[str, Positions] = positions
        has_cosine = "cosine" in weights
        if has_cosine and of_student.hidden_size != of_teacher.hidden_size:
            raise UserError(
                f"distilbert.cosine compares hidden states, but they are {of_teacher.hidden_size} wide in the teacher "
                f"and {of_student.hidden_size} in the student: set distilbert.cosine to 0, or give the student the "
                "teacher's width"
            )
        self.student_taps: TapRequest = {"hidden": frozenset({self._student_layer})} if has_cosine else {}
        self.teacher_taps: TapRequest = {"hidden": frozenset({self._teacher_layer})} if has_cosine else {}
        self.needs_teacher = settings.soft > 0 or has_cosine
        self.projections: Mapping[Aspect, tuple[int, int]] = {}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The terms of one batch, unweighted, under the names of `weights`."""
        terms: dict[str, LossSum] = {}
        if self._settings.soft > 0:
            assert teacher is not None
            terms |= divergence_terms(
                SOFT,
                student,
                teacher,
                batch,
                self._objective,
                divergence=forward_kl,
                temperature=self._settings.temperature,
                causal=self._causal,
            )
        if self._settings.label > 0:
            terms |= label_terms(student, batch, self._objective, causal=self._causal)
        if self._settings.cosine > 0:
            assert teacher is not None
            terms["cosine"] = hidden_cosine(
                student.taps.hidden[self._student_layer],
                teacher.taps.hidden[self._teacher_layer],
                batch.attention_mask,
            )
        return terms


def _terms(settings: DistilbertConfig, objective: Objective) -> tuple[dict[str, float], dict[str, Positions]]:
    """Weight and positions of each term that has a weight."""
    weights: dict[str, float] = {}
    positions: dict[str, Positions] = {}
    for names, weight in ((SOFT, settings.soft), (LABEL, settings.label)):
        if weight > 0:
            weights |= dict.fromkeys(names.positions(objective), weight)
            positions |= names.positions(objective)
    if settings.cosine > 0:
        weights["cosine"], positions["cosine"] = settings.cosine, "tokens"
    return weights, positions
