"""Waits for the answers that the next step needs from a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmdistill.errors import UserError
from llmdistill.runtime.distributed import on_every
from llmdistill.step.teacher import AsyncTeacher
from llmdistill.training.callbacks.base import TrainState
from llmdistill.training.trainer import Trainer


@dataclass(frozen=True)
class ServerAnswers:
    """Waits for the answers of the next step, so that a lost server ends the training after a whole step.

    In the middle of a step a rank without answers would leave the others in a collective.
    """

    reads: ClassVar[tuple[str, ...]] = ("settings", "step", "signal")
    gives: ClassVar[tuple[str, ...]] = ("failure",)

    trainer: Trainer

    def after_step(self, state: TrainState) -> None:
        """See Callback: find whether a server is lost, or refuses an example. Every rank must call it."""
        # After a signal the next step is not trained, but a row of the log compares the models on its batch.
        if state.is_last or (state.signal and not state.is_due(state.settings.log_every)):
            return
        trainer, teacher = self.trainer, self.trainer.teacher
        try:
            batches = trainer.micro_batches(state.step)
            if isinstance(teacher, AsyncTeacher):
                with trainer.teacher_time.measured():
                    on_every(lambda: teacher.wait(batches))
        except UserError as failure:
            state.failure = failure
