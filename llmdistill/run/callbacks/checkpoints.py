"""Saves checkpoints while a run trains, and ends the training at a signal, after a step on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdistill.errors import Stopped
from llmdistill.run.callbacks.base import TrainState
from llmdistill.run.checkpoints import save_checkpoint
from llmdistill.run.loss_check import LossModes
from llmdistill.runtime import signals
from llmdistill.runtime.distributed import World, largest_later


class Stopping:
    """The signals of all ranks. A launcher may reach one rank only, and none must leave the others in a collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asked: Callable[[], int] | None = None

    def after_step(self, state: TrainState) -> None:
        """See Callback: find the signal that stops the training after this step.

        With several ranks a signal is known one step later, so that the hosts do not wait for each other in every step;
        at the last step they do.
        """
        before, self._asked = self._asked, largest_later(signals.caught(), self._world)
        state.signal = 0 if before is None else before()
        if state.is_last or state.signal or self._world.size == 1:
            state.signal = max(state.signal, self._asked())
            self._asked = None


@dataclass(frozen=True)
class Checkpoints:
    """Saves every `train.save_every` steps, after the last step, and when a signal ends the training."""

    engine: Any
    folder: Path
    """The run's folder."""
    world: World
    loss_modes: LossModes
    """How the token losses of the models are computed, which a checkpoint keeps."""

    def after_step(self, state: TrainState) -> None:
        """See Callback.

        Raises:
            Stopped: a signal has come, and the step is saved.
        """
        if state.signal or state.is_due(state.settings.save_every):
            keep = state.settings.keep_checkpoints
            save_checkpoint(self.engine, self.folder, state.step, keep, self.world, loss_modes=self.loss_modes)
        if state.signal:
            raise Stopped(state.signal, f"after step {state.step}")
