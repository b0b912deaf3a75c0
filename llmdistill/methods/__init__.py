"""Training methods: each says which taps it needs and turns outputs into weighted terms.

A method has what `Method` lists, and is called with the student's outputs, the teacher's (None if it needs none) and
the batch. A new one is a class of that form and an entry in METHODS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.config import KdConfig, MinilmConfig, Minilmv2Config
from llmdistill.methods.combined import Combined
from llmdistill.methods.distilbert import Distilbert
from llmdistill.methods.kd import Kd
from llmdistill.methods.layer_map import same_direction
from llmdistill.methods.makd import build_makd
from llmdistill.methods.minilm import Minilm
from llmdistill.methods.minilmv2 import Minilmv2
from llmdistill.methods.objective import WORDS, Objective
from llmdistill.methods.sft import Sft
from llmdistill.methods.tinybert import Tinybert
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
    projections: Mapping[Aspect, tuple[int, int]]
    """Aspects whose student taps a learnt matrix maps to the teacher's width before they are compared (they are then in
    `Taps.projected`): the width that goes in, heads side by side, and the one that comes out."""

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The unweighted terms of one batch."""
        ...


def build_method(
    names: Sequence[str],
    settings: Mapping[str, Any],
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    objective: Objective = WORDS,
) -> Method:
    """One method as it is, or several as one.

    Args:
        names: keys of METHODS.
        settings: of each method that has any, by its name.
        teacher: the teacher's config.
        student: the student's config.
        objective: what the batches have to be learnt.

    Raises:
        UserError: a method's settings do not fit the models, or the models each other.
    """
    methods = {name: METHODS[name](settings.get(name), teacher, student, objective) for name in names}
    if len(names) == 1:
        return methods[names[0]]
    return Combined(methods)


def _build_sft(
    settings: None, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = WORDS
) -> Method:
    return Sft(causal=family_of(student).causal, objective=objective)


def _build_kd(
    settings: KdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = WORDS
) -> Method:
    return Kd(settings, causal=same_direction(teacher, student, method="kd"), objective=objective)


def _build_minilm(
    settings: MinilmConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = WORDS
) -> Method:
    return Minilm(settings, teacher, student)  # it never looks at the output


def _build_minilmv2(
    settings: Minilmv2Config, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = WORDS
) -> Method:
    return Minilmv2(settings, teacher, student)  # nor does this


METHODS: dict[str, Callable[[Any, PreTrainedConfig, PreTrainedConfig, Objective], Method]] = {
    "makd": build_makd,
    "kd": _build_kd,
    "minilm": _build_minilm,
    "minilmv2": _build_minilmv2,
    "distilbert": Distilbert,
    "tinybert": Tinybert,
    "sft": _build_sft,
    "seqkd": _build_sft,  # the same loss; the answers are the teacher's
    "none": _build_sft,  # never trained
}
"""By name: a function of the method's settings, the teacher's config, the student's config and the objective."""
