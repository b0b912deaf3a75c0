"""Entries of the table of methods, with all that the command line, plans, comparisons and reports need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from llmdistill.config import RunConfig
    from llmdistill.objective import Objective
    from llmdistill.step.method import Method

Build = Callable[[Any, "PreTrainedConfig", "PreTrainedConfig", "Objective"], "Method"]
"""Builds a method from its settings, the teacher's config, the student's config, and the objective (the targets that
the batches have). Raises UserError if the settings do not fit the models, or the models do not fit each other."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A method with certain settings, which has a name of its own in comparisons."""

    label: str
    """Name in reports."""
    settings: Mapping[str, Any]
    """Settings of the run other than `method`, by dotted key."""
    grid: Mapping[str, Sequence[Any]] | None = None
    """Values to try, by dotted key; None takes those of the method."""


@dataclass(frozen=True, kw_only=True, eq=False)  # hashed by identity: parsers are cached by the table of methods
class MethodEntry:
    """One method. Most methods need none of the flags."""

    label: str
    """Name in reports."""
    help: str
    """Describes the method in a few words, for `--help`, which prints this text behind the method's name."""
    build: Build
    settings: type[Any] | None = None
    """Frozen keyword-only dataclass of the method's settings. A run has these settings under the method's name. The
    docstring under a field is its help text. None if the method has no settings."""
    check: Callable[[Any, RunConfig], None] = lambda settings, config: None
    """Called with the method's settings and the run's configuration if the run uses the method. Raises ValueError,
    with one sentence, if they do not fit each other."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that a comparison tries in addition to its learning rates, by dotted key of the run's settings."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    """Further names of the method in comparisons, each with its own settings."""
    needs_teacher: bool = True
    """Whether the method needs a teacher during training. Only such methods can be added to others with `also`."""
    uses_output: bool = False
    """Whether the method by default uses the models' outputs or the labels. Only such a method benefits from
    pretraining with BERT's next-sentence prediction."""
    trains: bool = True
    """Whether the method trains the student."""
    other_tokens: bool = False
    """Whether the teacher may have another tokenizer than the student: the method compares nothing but the
    distributions at labels."""
    teacher_writes: bool = False
    """Whether the labels are answers that the teacher generated before training."""
    searches_layer: bool = False
    """Whether the settings have `teacher_layer`, which may be auto, and `search`, the settings of its search."""
    copies_classifier: bool = False
    """Whether the student's classifier on a task starts as the teacher's, unless the user sets it otherwise."""

    def defaults(self) -> Any:
        """Return the method's default settings, or None if the method has no settings."""
        return None if self.settings is None else self.settings()


def check_weights(method: str, settings: object, weights: tuple[str, ...]) -> None:
    """Raise a ValueError for a negative weight, or if all weights are 0."""
    for key in weights:
        if getattr(settings, key) < 0:
            raise ValueError(f"{method}.{key} is {getattr(settings, key)}: a weight is 0 (the term is off) or more")
    if not any(getattr(settings, key) for key in weights):
        raise ValueError(f"{method}: no term is left to train with: give one of {', '.join(weights)} a weight over 0")


def check_one_map(method: str, layer: int | str, layers: str | None) -> None:
    """Raise a ValueError if a method's teacher_layer and teacher_layers are both set."""
    if layer != "last" and layers is not None:
        raise ValueError(
            f"{method}.teacher_layer {layer} names one layer and {method}.teacher_layers {layers} a layer for each: "
            "leave one of them out"
        )
