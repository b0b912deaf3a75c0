"""What a server answers for the next step is waited for between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from llmdistill.errors import UserError
from llmdistill.run.callbacks.base import TrainState
from llmdistill.run.trainer import Trainer
from llmdistill.runtime.distributed import on_every
from llmdistill.teacher.remote import RemoteTeacher


@dataclass(frozen=True)
class Answers:
    """Waits for the answers of the next step, so that a lost server ends the training after a whole step.

    In the middle of a step a rank without answers would leave the others in a collective.
    """

    trainer: Trainer
    teacher: RemoteTeacher | None
    """The teacher behind a server; None if only the student's answers come from one."""

    def after_step(self, state: TrainState) -> None:
        """See Callback: find whether a server is lost, or refuses an example. Every rank must call it."""
        if state.is_last or state.signal:
            return
        try:
            batches = self.trainer.micro_batches(state.step)
            if self.teacher is not None:
                teacher = self.teacher
                with self.trainer.teaching.running():
                    on_every(lambda: teacher.wait(batches), self.trainer.world)
        except UserError as failure:
            state.failure = failure
