"""Word-level distillation of the output (Hinton et al. 2015; GKD; DistiLLM): a divergence, and the labels beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from llmdistill.batch import Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.config import KdConfig
from llmdistill.losses import divergence
from llmdistill.losses.divergence import output_divergence
from llmdistill.methods.label import label_term


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
    """ratio · divergence + (1 - ratio) · cross-entropy on the labels.

    Answers that the student wrote itself are no labels: on such batches the divergence stands alone.
    """

    def __init__(self, settings: KdConfig, *, causal: bool = True) -> None:
        """A decoder predicts the next token (causal), an encoder the masked one."""
        self._name: str = settings.divergence
        self._divergence = divergence_of(settings)
        self._temperature = settings.temperature
        self._causal = causal
        self.needs_teacher = True
        self.teacher_taps: TapRequest = {}
        self.student_taps: TapRequest = {}
        weights = {self._name: settings.ratio, "label": 1 - settings.ratio}
        self.weights: Mapping[str, float] = {name: weight for name, weight in weights.items() if weight > 0}
        self.positions: Mapping[str, Positions] = {name: "labels" for name in self.weights}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The divergence under its own name, and `label` unless ratio is 1."""
        assert teacher is not None
        terms: dict[str, LossSum] = {
            self._name: output_divergence(
                student.logits,
                teacher.logits,
                batch.labels,
                divergence=self._divergence,
                temperature=self._temperature,
                shift=self._causal,
            )
        }
        if "label" in self.weights:
            terms["label"] = label_term(student, batch, causal=self._causal)
        return terms
