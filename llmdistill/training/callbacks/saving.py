"""Saves checkpoints, and ends a training whose last step is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from llmdistill.errors import Stopped
from llmdistill.step.loss_modes import LossModes
from llmdistill.training.callbacks.base import Accumulator, TrainState
from llmdistill.training.checkpoints import save_checkpoint
from llmdistill.training.trainer import Trainer


@dataclass(frozen=True)
class Checkpoints:
    """Saves every `train.save_every` steps, after the last step, and when a signal or a failure ends the training."""

    reads: ClassVar[tuple[str, ...]] = ("settings", "step", "signal", "failure", "is_logged")
    gives: ClassVar[tuple[str, ...]] = ()

    trainer: Trainer
    folder: Path
    """The run's folder."""
    loss_modes: LossModes
    """How the token losses of the models are computed, which a checkpoint keeps."""
    accumulators: Mapping[str, Accumulator] = field(default_factory=dict)
    """The callbacks whose figures a checkpoint keeps, by the names that they have there."""

    def restore(self, figures: Mapping[str, Any]) -> None:
        """Let the accumulators go on from the figures of a checkpoint; one of an earlier version has none."""
        for name in self.accumulators.keys() & figures.keys():
            self.accumulators[name].restore(figures[name])

    def after_step(self, state: TrainState) -> None:
        """See Callback; once the step is saved, raise Stopped after a signal, or the failure."""
        if state.signal or state.failure is not None or state.is_due(state.settings.save_every):
            assert state.is_logged, "a checkpoint has the size of the log, and the figures of the next row alone"
            keep, trainer = state.settings.keep_checkpoints, self.trainer
            figures = {name: accumulator.figures() for name, accumulator in self.accumulators.items()}
            more = {"loss_modes": self.loss_modes, "figures": figures}
            save_checkpoint(trainer.engine, self.folder, state.step, keep, **more)
        if state.signal:
            raise Stopped(state.signal, f"after step {state.step}")
        if state.failure is not None:
            where = f"step {state.step} is saved, and the same command goes on from there"
            failure = type(state.failure)(f"{state.failure}; {where}")
            # All ranks raise it, so rank 0 alone says it.
            failure.everywhere = True
            raise failure
