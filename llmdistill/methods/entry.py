"""What the table of methods holds for each of them: all that the command line, plans, comparisons and reports ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llmdistill.config import RunConfig
    from llmdistill.methods.method import Method
    from llmdistill.objective import Objective

Build = Callable[[Any, "PreTrainedConfig", "PreTrainedConfig", "Objective"], "Method"]
"""Makes a method from its settings, the teacher's config, the student's config, and what the batches have to be
learnt. Raises UserError where the settings do not fit the models, or the models each other."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A method under certain settings, as a comparison knows it by a name of its own."""

    label: str
    """Name in reports."""
    settings: Mapping[str, Any]
    """Settings of the run besides `method`, by dotted key."""
    grid: Mapping[str, Sequence[Any]] | None = None
    """Values to try, by dotted key; without it those of the method."""


def no_check(settings: Any, config: RunConfig) -> None:
    """The check of a method that works with any data."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MethodEntry:
    """One method. Of the flags most methods need none."""

    label: str
    """Name in reports."""
    help: str
    """What the method is, for `--help`, in a few words behind its name."""
    build: Build
    settings: type[Any] | None = None
    """Frozen keyword-only dataclass of the method's settings, which a run has under the method's name. The docstring
    under a field is its help text. None where there is nothing to set."""
    check: Callable[[Any, RunConfig], None] = no_check
    """Called with the method's settings and the run's, where the run uses the method. Raises ValueError, with one
    sentence, where they do not go together."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that a comparison tries besides its learning rates, by dotted key of a run's settings."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """Further names for the method in comparisons."""
    needs_teacher: bool = True
    """Whether a teacher is at work beside the student. Only such methods can be added to others, by `also`."""
    uses_output: bool = False
    """Whether the method by default compares the models' outputs, or learns the labels: pretraining by BERT's next
    sentences is of use only then."""
    trains: bool = True
    """Whether there is anything to train."""
    on_policy: bool = False
    """Whether the student can learn from answers that it writes itself (data.on_policy)."""
    teacher_writes: bool = False
    """Whether the labels are answers that the teacher wrote before."""
    searches_layer: bool = False
    """Whether the settings have `teacher_layer`, which may be auto, and `search`, the settings of its search."""
    copies_classifier: bool = False
    """Whether the student's classifier on a task starts as the teacher's, unless the user says otherwise."""

    def defaults(self) -> Any:
        """The method's default settings; None where there is nothing to set."""
        return None if self.settings is None else self.settings()


def check_weights(method: str, settings: object, keys: tuple[str, ...]) -> None:
    """Check the weights of a method's terms.

    Raises:
        ValueError: one is negative, or all are 0.
    """
    for key in keys:
        if getattr(settings, key) < 0:
            raise ValueError(f"{method}.{key} is {getattr(settings, key)}: a weight is 0 (the term is off) or more")
    if not any(getattr(settings, key) for key in keys):
        raise ValueError(f"{method}: no term is left to train with: give one of {', '.join(keys)} a weight over 0")
