"""How a training ends between two steps: by a signal, by a lost server, and with its last step saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmdistill.errors import Stopped, UserError
from llmdistill.run.callbacks.base import TrainState
from llmdistill.run.checkpoints import save_checkpoint
from llmdistill.run.loss_check import LossModes
from llmdistill.run.trainer import Trainer
from llmdistill.runtime import signals
from llmdistill.runtime.distributed import World, largest_later, on_every
from llmdistill.teacher.remote import RemoteTeacher


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
class Answers:
    """Waits for the answers of the next step, so that a lost server ends the training after a whole step.

    In the middle of a step a rank without answers would leave the others in a collective.
    """

    trainer: Trainer

    def after_step(self, state: TrainState) -> None:
        """See Callback: find whether a server is lost, or refuses an example. Every rank must call it."""
        if state.is_last or state.signal:
            return
        trainer, teacher = self.trainer, self.trainer.teacher
        try:
            batches = trainer.micro_batches(state.step)
            if isinstance(teacher, RemoteTeacher):
                with trainer.teaching.running():
                    on_every(lambda: teacher.wait(batches), trainer.world)
        except UserError as failure:
            state.failure = failure


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
