"""Training methods: each says which taps it needs and turns outputs into weighted terms.

A method has `weights`, `positions`, `teacher_taps`, `student_taps`, `needs_teacher`, and is called with the student's
outputs, the teacher's (None if it needs none) and the batch. A new one is a class of that form and an entry in METHODS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from transformers import PreTrainedConfig

from llmdistill.batch import Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.config import KdConfig
from llmdistill.methods.kd import Kd
from llmdistill.methods.makd import build_makd
from llmdistill.methods.sft import Sft
from llmdistill.models.families import family_of


class Method(Protocol):
    """What the trainer knows of a method."""

    weights: Mapping[str, float]
    """Factor of each term; the same names as the terms."""
    positions: Mapping[str, Positions]
    """What each term is a sum over, so that its global count is known before the first backward pass."""
    teacher_taps: TapRequest
    student_taps: TapRequest
    needs_teacher: bool

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The unweighted terms of one batch."""
        ...


def _build_sft(settings: None, teacher: PreTrainedConfig, student: PreTrainedConfig) -> Method:
    return Sft(causal=family_of(student).causal)


def _build_kd(settings: KdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig) -> Method:
    return Kd(settings, causal=family_of(student).causal)


METHODS: dict[str, Callable[[Any, PreTrainedConfig, PreTrainedConfig], Method]] = {
    "makd": build_makd,
    "kd": _build_kd,
    "sft": _build_sft,
    "seqkd": _build_sft,  # the same loss; the answers are the teacher's
    "none": _build_sft,  # never trained
}
"""By name: a function of the method's settings, the teacher's config and the student's config."""
