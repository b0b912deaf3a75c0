"""The table of the forms that a student can have beside dense and factorized, and functions that go through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.config.strict import did_you_mean
from llmdistill.config.student import StudentConfig
from llmdistill.errors import UserError
from llmdistill.models.adapters import Adapters, cast_parameters
from llmdistill.models.quantized import FewBits
from llmdistill.models.student_form import SavedSize, StudentForm
from llmdistill.plugins import load_plugins

BUILT_IN: dict[str, StudentForm] = {"lora": Adapters(), "quantize": FewBits()}
"""Those of llmdistill, by their sections of settings: student.lora and student.quantize."""
FORMS: dict[str, StudentForm] = dict(BUILT_IN)
"""All in the order in which they are added; those of other packages have their settings under student.forms."""


def chosen_forms(student: StudentConfig) -> list[tuple[StudentForm, Any]]:
    """Return the forms that a student has, each with its settings.

    Raises:
        UserError: student.forms names a form that is not installed, or a setting that it does not have; or two forms
            change what a saved student consists of.
    """
    further: dict[str, dict[str, Any]] = {}
    for key, value in (student.forms or {}).items():
        name, _, setting = key.partition(".")  # of a command line, where student.forms.pruned.share is one setting
        if name not in FORMS or name in BUILT_IN:
            raise UserError(
                f"student.forms.{name}: no form of this name is registered, by an entry point in llmdistill.forms or "
                "in FORMS"
                f"{did_you_mean(name, FORMS.keys() - BUILT_IN)}"
            )
        if not setting and not isinstance(value, dict | None):
            raise UserError(
                f"student.forms.{name} is {value!r}: give its settings, such as student.forms.{name}: {{...}}"
            )
        further[name] = {**further.get(name, {}), **({setting: value} if setting else value or {})}
    chosen: dict[str, tuple[StudentForm, Any]] = {}
    for name, form in FORMS.items():
        if name in BUILT_IN:
            key, settings = f"student.{name}", getattr(student, name)
        elif name in further:
            key = f"student.forms.{name}"
            settings = read_settings(form, further[name], key=key)
        else:
            continue
        if form.is_chosen(settings):
            chosen[key] = form, settings
    saved = [key for key, (form, _) in chosen.items() if form.key is not None]
    if len(saved) > 1:  # transformers loads a model by one quantizer, so the tensors can be those of one form
        raise UserError(f"{' and '.join(saved)} each change how a student is saved and loaded: choose one of them")
    return list(chosen.values())


def read_settings(form: StudentForm, values: Mapping[str, Any], *, key: str) -> Any:
    """Return the settings of a form from values by name; raise a UserError, which names `key`, if they do not fit."""
    from llmdistill.config.command_line import with_values  # so that loading a model does not wait for jsonargparse

    return with_values(form.settings(), values, key=key)


def describe(student: StudentConfig) -> str:
    """Return what the forms add to the first lines of a run."""
    return "".join(form.describe(settings) for form, settings in chosen_forms(student))


def adapt(model: PreTrainedModel, student: StudentConfig, seed: int) -> None:
    """Prepare a student for training, in place."""
    for form, settings in chosen_forms(student):
        form.add(model, settings, seed)


def trains_form_alone(student: StudentConfig) -> bool:
    """Return whether only the parameters of a form are trained."""
    return any(form.trains_alone() for form, _ in chosen_forms(student))


def saved_size(
    params: int, dtype: torch.dtype, student: StudentConfig, build: Callable[[], PreTrainedModel]
) -> SavedSize:
    """Return the size of a saved student with its forms, from its number of parameters without them.

    `build` makes the student on the meta device, with its factors; it is counted in the dtype that it is saved in.
    """

    def build_as_saved() -> PreTrainedModel:
        model = build()
        cast_parameters(model, dtype)
        return model

    size = SavedSize(params=params, bytes=params * dtype.itemsize)
    for form, settings in chosen_forms(student):
        size = form.saved_size(size, settings, build_as_saved)
    return size


@torch.no_grad()
def finish(model: PreTrainedModel, student: StudentConfig, state: dict[str, Tensor]) -> None:
    """Give an untrained student the weights that were trained, and the form in which it is saved, in place."""
    if not trains_form_alone(student):
        model.load_state_dict(state)
    for form, settings in chosen_forms(student):
        form.finish(model, settings, state)


def exported_forms() -> dict[str, StudentForm]:
    """Return the forms that a model can be exported in, by what `llmdistill export --to` calls them."""
    return {to: form for form in FORMS.values() for to in form.exports}


def saved_form(config: PreTrainedConfig) -> StudentForm | None:
    """Return the form of a saved model; None for a dense or factorized one."""
    return form_of(getattr(config, "quantization_config", None))


def form_of(saved: Any) -> StudentForm | None:
    """Return the form of a model with this quantization_config."""
    return next((form for form in FORMS.values() if form.saved_as(saved) is not None), None)


def remove_forms(model: PreTrainedModel) -> None:
    """Replace the forms of a model by ordinary weights, in place; factors stay factors."""
    for form in FORMS.values():
        form.remove(model)


FORMS |= load_plugins("llmdistill.forms", BUILT_IN)  # last, because the packages import the names above
