"""The table of the forms that a student can have beside dense and factorized, and functions that go through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.config.student import StudentConfig
from llmdistill.models.adapters import Adapters
from llmdistill.models.quantized import FewBits
from llmdistill.models.student_form import StudentForm

FORMS: list[StudentForm] = [Adapters(), FewBits()]
"""In the order in which they are added. A new one is a file with its class, and an entry here."""


def describe(settings: StudentConfig) -> str:
    """Return what the forms add to the first lines of a run."""
    return "".join(form.describe(settings) for form in FORMS)


def adapt(model: PreTrainedModel, settings: StudentConfig, seed: int) -> None:
    """Prepare a student for training, in place."""
    for form in FORMS:
        form.add(model, settings, seed)


def learns_by_a_form(settings: StudentConfig) -> bool:
    """Return whether only the parameters of a form are trained."""
    return any(form.is_all_that_learns(settings) for form in FORMS)


@torch.no_grad()
def finish(model: PreTrainedModel, settings: StudentConfig, state: dict[str, Tensor]) -> None:
    """Give an untrained student the weights that were trained, and the form in which it is saved, in place."""
    if not learns_by_a_form(settings):
        model.load_state_dict(state)
    for form in FORMS:
        form.finish(model, settings, state)


def saved_form(config: PreTrainedConfig) -> StudentForm | None:
    """Return the form of a saved model; None for a dense or factorized one."""
    return form_of(getattr(config, "quantization_config", None))


def form_of(saved: Any) -> StudentForm | None:
    """Return the form of a model with this quantization_config."""
    return next((form for form in FORMS if form.saved_as(saved) is not None), None)


def remove_forms(model: PreTrainedModel) -> None:
    """Replace the forms of a model by ordinary weights, in place; factors stay factors."""
    for form in FORMS:
        form.remove(model)
