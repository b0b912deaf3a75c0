"""The protocol of a student's forms: what lies over its dense or factorized matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer


def is_size(value: object) -> bool:
    """Return whether a value of a config.json can be the size of a matrix, of a factor or of a group of weights."""
    return type(value) is int and 1 <= value < 2**31


@dataclass(frozen=True, kw_only=True)
class SavedSize:
    """How large a saved student is."""

    params: int
    """The number of its parameters."""
    bytes: int
    """Bytes of its weights."""


@dataclass(frozen=True, kw_only=True)
class NoSettings:
    """The settings of a form that has none."""


class StudentForm:
    """A form that a student has if its settings choose it. Every method may stay as it is here, and then does nothing.

    The forms are applied in the order of the table `forms.FORMS`, over the factors (`students.kinds`) or the dense
    matrices. A student may have several, of which one has a `key`; pairs that exclude each other are in
    `training.rules`. What methods get as `settings` are those of the form itself.
    """

    settings: ClassVar[type[Any]] = NoSettings
    """Frozen keyword-only dataclass of the form's settings, which a run has under student.forms.NAME."""
    key: ClassVar[str | None] = None
    """The key under quantization_config of llmdistill in config.json; None if a saved student has nothing of the form.
    """
    extra: ClassVar[str] = ""
    """The extra of llmdistill that loads a saved student, and the package that loads one without factors."""
    package: ClassVar[str] = ""
    serving: ClassVar[str] = ""
    """A sentence of the model card that says where such a student is served."""
    exports: ClassVar[tuple[str, ...]] = ()
    """What `llmdistill export --to` calls a model in this form, such as int8; empty if no model is exported so."""

    def is_chosen(self, settings: Any) -> bool:
        """Return whether these settings choose the form; those under student.forms always do."""
        return True

    def describe(self, settings: Any) -> str:
        """Return what the first lines of a run and the card of an export add to the student, such as
        `, linears in int4`.
        """
        return ""

    def check(self, settings: Any, build: Callable[[], PreTrainedModel]) -> None:
        """Raise a UserError if a package is missing, or if the student that `build` makes on the meta device, with its
        factors, cannot have the form.
        """

    def trains_alone(self) -> bool:
        """Return whether only the parameters of the form are trained, so that checkpoints hold these."""
        return False

    def add(self, model: PreTrainedModel, settings: Any, seed: int) -> None:
        """Give a student the form in which it learns, in place; also on the meta device, where plans count memory."""

    def saved_size(self, size: SavedSize, settings: Any, build: Callable[[], PreTrainedModel]) -> SavedSize:
        """Return the size of a saved student with the form, from that without it.

        `build` is that of `check`, in the dtype that the student is saved in.
        """
        return size

    def finish(self, model: PreTrainedModel, settings: Any, state: Mapping[str, Tensor]) -> None:
        """Give a student the form in which it is saved, in place; `llmdistill export` does so with any model.

        `state` is what was trained, of every parameter or, with `trains_alone`, of this form's.
        """

    def needs_plain_factors(self, settings: Any) -> bool:
        """Return whether pivoted factors lose too much in this form, so that `llmdistill export` writes others."""
        return False

    def export_settings(self, to: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings by name with which a model is exported `to` one of `exports`."""
        return given

    def saved_as(self, saved: Any) -> str | None:
        """Return what the form makes of a model with this quantization_config, such as "linears in int4"; None if the
        model does not have the form.
        """
        return None

    def check_package(self, what: str) -> None:
        """Raise a UserError that says what needs the package, if a saved model cannot be loaded without one."""

    def is_valid(self, value: object) -> bool:
        """Return whether this version can read the value of `key`."""
        return False

    def loader(self, value: Any) -> HfQuantizer:
        """Return transformers' quantizer, which loads and saves the tensors of a student with this value of `key`."""
        raise NotImplementedError

    def settle(self, model: PreTrainedModel) -> None:
        """Do what remains once transformers has loaded a model that has the form, in place, and any number of times."""

    def remove(self, model: PreTrainedModel) -> None:
        """Replace the form by ordinary weights, in place, if a model has it; factors stay factors."""
