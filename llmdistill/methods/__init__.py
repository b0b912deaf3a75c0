"""The training methods. Each method builds its weighted loss terms from its settings and the configs of both models.

To add a method, write a file with its settings, a function that returns a `Method`, and a `MethodEntry`, and add the
entry to METHODS. Users add their own method to METHODS before they parse the command line, or name it as an entry
point of the group `llmdistill.methods`. This package does not import torch before it builds a method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmdistill.methods.distilbert import DISTILBERT
from llmdistill.methods.embedding import EMBEDDING
from llmdistill.methods.entry import MethodEntry, Preset
from llmdistill.methods.kd import KD
from llmdistill.methods.kroneckerbert import KRONECKERBERT
from llmdistill.methods.makd import MAKD
from llmdistill.methods.minilm import MINILM
from llmdistill.methods.minilmv2 import MINILMV2
from llmdistill.methods.sft import SEQKD, SFT, UNTRAINED
from llmdistill.methods.tinybert import TINYBERT
from llmdistill.objective import TOKENS, Objective
from llmdistill.plugins import load_plugins
from llmdistill.step.method import Method, Terms, combine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["METHODS", "Method", "MethodEntry", "Preset", "Terms", "build_method"]

METHODS: dict[str, MethodEntry] = {
    "makd": MAKD,
    "kd": KD,
    "minilm": MINILM,
    "minilmv2": MINILMV2,
    "distilbert": DISTILBERT,
    "tinybert": TINYBERT,
    "kroneckerbert": KRONECKERBERT,
    "sft": SFT,
    "seqkd": SEQKD,
    "embedding": EMBEDDING,
    "none": UNTRAINED,
}
"""The methods by the name that users type. Their settings have the same name."""
METHODS |= load_plugins("llmdistill.methods", METHODS)


def build_method(
    names: Sequence[str],
    settings: Mapping[str, Any],
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    objective: Objective = TOKENS,
) -> Method:
    """Build one method of METHODS, or combine several into one; one without settings gets its default settings.

    `teacher` and `student` are the models' configs. Raises UserError if the settings of a method do not fit the models,
    or the models do not fit each other.
    """
    methods = {
        name: METHODS[name].build(settings.get(name, METHODS[name].defaults()), teacher, student, objective)
        for name in names
    }
    return methods[names[0]] if len(names) == 1 else combine(methods)
