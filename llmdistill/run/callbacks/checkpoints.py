"""Saves checkpoints, and ends a training whose last step is saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llmdistill.errors import Stopped
from llmdistill.run.callbacks.base import TrainState
from llmdistill.run.checkpoints import save_checkpoint
from llmdistill.run.loss_check import LossModes
from llmdistill.run.trainer import Trainer


@dataclass(frozen=True)
class Checkpoints:
    """Saves every `train.save_every` steps, after the last step, and when a signal or a failure ends the training."""

    trainer: Trainer
    folder: Path
    """The run's folder."""
    loss_modes: LossModes
    """How the token losses of the models are computed, which a checkpoint keeps."""

    def after_step(self, state: TrainState) -> None:
        """See Callback; once the step is saved, raise Stopped after a signal, or the failure."""
        if state.signal or state.failure is not None or state.is_due(state.settings.save_every):
            keep, trainer = state.settings.keep_checkpoints, self.trainer
            save_checkpoint(trainer.engine, self.folder, state.step, keep, trainer.world, loss_modes=self.loss_modes)
        if state.signal:
            raise Stopped(state.signal, f"after step {state.step}")
        if state.failure is not None:
            where = f"step {state.step} is saved, and the same command goes on from there"
            failure = type(state.failure)(f"{state.failure}; {where}")
            failure.everywhere = True
            raise failure
