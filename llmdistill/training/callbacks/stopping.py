"""Finds the signals after which a training stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from llmdistill.runtime import signals
from llmdistill.runtime.distributed import World, largest_later
from llmdistill.training.callbacks.base import TrainState


class Stopping:
    """The signals of all ranks. A launcher may reach one rank only, and none must leave the others in a collective."""

    reads: ClassVar[tuple[str, ...]] = ("settings", "step", "signal")
    gives: ClassVar[tuple[str, ...]] = ("signal",)

    def __init__(self) -> None:
        self._signal: Callable[[], int] | None = None
        """Returns the largest signal that a rank had received after the step before."""

    def after_step(self, state: TrainState) -> None:
        """See Callback: find the signal that stops the training after this step.

        With several ranks a signal is known one step later, so that the hosts do not wait for each other in every step;
        at the last step they do.
        """
        before, self._signal = self._signal, largest_later(signals.first_signal())
        state.signal = 0 if before is None else before()
        if state.is_last or state.signal or World.current().size == 1:
            # No rank may leave the training during a collective.
            state.signal = max(state.signal, self._signal())
            self._signal = None
