"""Training methods: each builds, from its settings and two models' configs, weighted terms and what they need.

A new one is a function that returns a `Method`, and an entry in METHODS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from llmdistill.config import KdConfig
from llmdistill.methods.combined import combine
from llmdistill.methods.distilbert import build_distilbert
from llmdistill.methods.kd import make_kd
from llmdistill.methods.kroneckerbert import build_kroneckerbert
from llmdistill.methods.layer_map import same_direction
from llmdistill.methods.makd import build_makd
from llmdistill.methods.method import Method
from llmdistill.methods.minilm import build_minilm
from llmdistill.methods.minilmv2 import build_minilmv2
from llmdistill.methods.sft import make_sft
from llmdistill.methods.tinybert import build_tinybert
from llmdistill.models.families import family_of
from llmdistill.objective import TOKENS, Objective

__all__ = ["METHODS", "Method", "build_method"]


def build_method(
    names: Sequence[str],
    settings: Mapping[str, Any],
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    objective: Objective = TOKENS,
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
    return methods[names[0]] if len(names) == 1 else combine(methods)


def _build_sft(
    settings: None, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    return make_sft(causal=family_of(student).causal, objective=objective)


def _build_kd(
    settings: KdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = TOKENS
) -> Method:
    return make_kd(settings, causal=same_direction(teacher, student, method="kd"), objective=objective)


METHODS: dict[str, Callable[[Any, PreTrainedConfig, PreTrainedConfig, Objective], Method]] = {
    "makd": build_makd,
    "kd": _build_kd,
    "minilm": build_minilm,
    "minilmv2": build_minilmv2,
    "distilbert": build_distilbert,
    "tinybert": build_tinybert,
    "kroneckerbert": build_kroneckerbert,
    "sft": _build_sft,
    "seqkd": _build_sft,  # the same loss; the answers are the teacher's
    "none": _build_sft,  # never trained
}
"""By name: a function of the method's settings, the teacher's config, the student's config and the objective."""
