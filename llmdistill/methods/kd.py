"""Distillation of the output (Hinton et al. 2015; GKD; DistiLLM): a divergence, and the labels beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.config import KdConfig
from llmdistill.losses import divergence
from llmdistill.methods.label import label_terms
from llmdistill.methods.objective import LABEL, WORDS, Objective, OutputTerm
from llmdistill.methods.output import divergence_terms


def divergence_of(settings: KdConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """The chosen divergence, as a function of the teacher's and the student's log-probabilities, (N, V) to (N,)."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "forward_kl": divergence.forward_kl,
        "reverse_kl": divergence.reverse_kl,
        "jsd": partial(divergence.jsd, beta=settings.beta),
        "skew_forward_kl": partial(divergence.skew_forward_kl, alpha=settings.alpha),
        "skew_reverse_kl": partial(divergence.skew_reverse_kl, alpha=settings.alpha),
        "tvd": divergence.total_variation,
    }
    return functions[settings.divergence]


class Kd:
    """ratio · divergence + (1 - ratio) · cross-entropy on the labels; on words, on what is said of sequences, or both.

    Scores have no distribution: there the squared error stands in both places, as `sequence_mse` to the teacher's.
    Answers that the student wrote itself are no labels: on such batches the divergence stands alone.
    """

    def __init__(self, settings: KdConfig, *, causal: bool = True, objective: Objective = WORDS) -> None:
        """A decoder predicts the next token (causal), an encoder the masked one."""
        measure = "mse" if objective.sequences == "scores" else settings.divergence
        self._names = OutputTerm(settings.divergence, f"sequence_{measure}")
        self._divergence = divergence_of(settings)
        self._temperature = settings.temperature
        self._causal, self._objective = causal, objective
        self._has_labels = settings.ratio < 1
        self.needs_teacher = True
        self.teacher_taps: TapRequest = {}
        self.student_taps: TapRequest = {}
        self.projections: Mapping[Aspect, tuple[int, int]] = {}
        to_teacher = self._names.positions(objective)
        to_labels = LABEL.positions(objective) if self._has_labels else {}
        self.positions: Mapping[str, Positions] = to_teacher | to_labels
        self.weights: Mapping[str, float] = dict.fromkeys(to_teacher, settings.ratio) | dict.fromkeys(
            to_labels, 1 - settings.ratio
        )

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The divergence under its own name, and `label` unless ratio is 1; on sequences sequence_*."""
        assert teacher is not None
        terms = divergence_terms(
            self._names,
            student,
            teacher,
            batch,
            self._objective,
            divergence=self._divergence,
            temperature=self._temperature,
            causal=self._causal,
        )
        if self._has_labels:
            terms |= label_terms(student, batch, self._objective, causal=self._causal)
        return terms
