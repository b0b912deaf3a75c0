"""The protocol of callbacks, and what they see of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from llmdistill.batch import Batch
from llmdistill.config import TrainConfig
from llmdistill.errors import UserError


class StepTerms(NamedTuple):
    """The figures of one step, the same on every rank."""

    step: int
    """From 1."""
    values: Mapping[str, float]
    """Each term of the loss, divided by the global counts."""


@dataclass(kw_only=True)
class TrainState:
    """A step that is done, on every rank, and below what the callbacks find about it."""

    settings: TrainConfig
    step: int
    """From 1."""
    micro_batches: list[Batch]
    """This rank's."""
    losses: Tensor
    """This rank's terms of each micro batch, (micro batches, terms), divided by the global counts."""
    counts: Tensor
    """The global counts in the order of POSITIONS."""
    was_applied: bool
    """False if DeepSpeed skipped the step, because its gradient is not finite."""

    failure: UserError | None = None
    """What keeps the training from going on after this step, on every rank; None if nothing does."""
    signal: int = 0
    """The signal that ends the training after this step; 0 without one."""
    known_terms: list[StepTerms] = field(default_factory=list)
    """The terms of the steps, this one or the one before it, whose values have reached the host."""
    is_finite: bool = False
    """Whether the terms that have reached the host are finite, and so is the student where it is saved."""
    lowest_loss: float = math.inf
    """The lowest loss of the steps so far."""
    measures: dict[str, float] = field(default_factory=dict)
    """Further figures of the row of the log that is due; empty if there are none."""
    validation: dict[str, float] = field(default_factory=dict)
    """What a validation of this step adds to the row of the log; empty without one."""
    validation_seconds: float = 0.0
    is_logged: bool = False
    """Whether the log has the row of this step, if one was due."""

    @property
    def is_last(self) -> bool:
        """Whether the training ends with this step."""
        return self.step == self.settings.steps

    def is_due(self, every: int | None) -> bool:
        """Whether something that is done every so many steps, and after the last one, is done now; None means never."""
        return every is not None and (self.step % every == 0 or self.is_last)

    @property
    def is_saved(self) -> bool:
        """Whether the student or a checkpoint is saved after this step."""
        return self.signal != 0 or self.failure is not None or self.is_last or self.is_due(self.settings.save_every)

    @property
    def is_read(self) -> bool:
        """Whether the student or the terms of this step are used now: saved, validated or logged."""
        return self.is_saved or self.is_due(self.settings.validate_every) or self.is_due(self.settings.log_every)


class Callback(Protocol):
    """Watches a training. A list of callbacks is the same, in the same order, on all ranks."""

    reads: ClassVar[tuple[str, ...]]
    """The fields of TrainState that it reads. Every callback that gives one of them comes before this one."""
    gives: ClassVar[tuple[str, ...]]
    """The fields that it sets. Several callbacks may give `measures` and `validation`: they add figures to them."""

    def after_step(self, state: TrainState) -> None:
        """Look at a step that is done, and set the fields that this callback gives."""
        ...


_ADDED_TO = frozenset({"measures", "validation"})


def check_order(callbacks: Sequence[Callback]) -> None:
    """Assert that no callback reads a field that a later one gives, and that no two set the same one."""
    for place, callback in enumerate(callbacks):
        for later in callbacks[place + 1 :]:
            late = ", ".join(sorted({*callback.reads} & {*later.gives}))
            names = type(callback).__name__, type(later).__name__
            assert not late, f"{names[0]} reads {late}, which {names[1]} gives: {names[1]} must come before it"
            twice = ", ".join(sorted({*callback.gives} & {*later.gives} - _ADDED_TO))
            assert not twice, f"{names[0]} and {names[1]} both give {twice}: the second would overwrite the first"


@runtime_checkable
class Accumulator(Callback, Protocol):
    """A callback whose figures run over several steps. A checkpoint keeps them, so that a kill changes no row."""

    def figures(self) -> dict[str, Any]:
        """Return them as plain JSON values, the same on every rank; every rank must call it."""
        ...

    def restore(self, figures: Mapping[str, Any]) -> None:
        """Go on from the figures of a checkpoint."""
        ...
