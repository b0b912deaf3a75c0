"""The protocol of a student's forms: what lies over its dense or factorized matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from llmdistill.config.student import StudentConfig


def is_size(value: object) -> bool:
    """Return whether a value of a config.json can be the size of a matrix, of a factor or of a group of weights."""
    return type(value) is int and 1 <= value < 2**31


class StudentForm:
    """A form that a student has if its settings ask for it. Every method may stay as it is here, and then does nothing.

    The forms are applied in the order of the table `forms.FORMS`, over the factors (`students.kinds`) or the dense
    matrices, and a student may have several; pairs that exclude each other are in `training.rules`.
    """

    key: ClassVar[str | None] = None
    """The key under quantization_config of llmdistill in config.json; None if a saved student has nothing of the form.
    """
    extra: ClassVar[str] = ""
    """The extra of llmdistill that loads a saved student, and the package that loads one without factors."""
    package: ClassVar[str] = ""
    serving: ClassVar[str] = ""
    """A sentence of the model card that says where such a student is served."""

    def describe(self, settings: StudentConfig) -> str:
        """Return what the first lines of a run add to the student, such as `, linears in int4`."""
        return ""

    def check(self, settings: StudentConfig, build: Callable[[], PreTrainedModel]) -> None:
        """Raise a UserError if a package is missing, or if the student that `build` makes on the meta device cannot
        have the form.
        """

    def is_all_that_learns(self, settings: StudentConfig) -> bool:
        """Return whether only the parameters of the form are trained, so that checkpoints hold these."""
        return False

    def add(self, model: PreTrainedModel, settings: StudentConfig, seed: int) -> None:
        """Give a student the form in which it learns, in place."""

    def finish(self, model: PreTrainedModel, settings: StudentConfig, state: dict[str, Tensor]) -> None:
        """Give a student the form in which it is saved, in place. `state` is what was trained, of every parameter or,
        with `is_all_that_learns`, of this form's.
        """

    def saved_as(self, saved: Any) -> str | None:
        """Return how a model with this quantization_config has the form, such as int4; None if it does not have it."""
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
