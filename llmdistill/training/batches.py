"""Where the batches of a training come from: from the data, or in part from the student's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmdistill.batch import Batch, Loader
from llmdistill.data.sampler import PrefetchingLoader
from llmdistill.runtime.distributed import World
from llmdistill.step.teacher import with_requests
from llmdistill.training.batch_source import BatchSource, LoaderParts
from llmdistill.training.callbacks.base import Callback
from llmdistill.training.own_answers import StudentBatches
from llmdistill.training.plan import Plan
from llmdistill.training.trainer import Trainer


def batch_source(plan: Plan) -> BatchSource:
    """Return where the batches of a run come from."""
    return DataBatches(plan) if plan.config.data.why_answers_change is None else StudentBatches(plan)


@dataclass(frozen=True)
class DataBatches:
    """The data as they are: a thread prepares the batches of the next step."""

    plan: Plan
    asks_server: ClassVar[bool] = False
    student_copy: ClassVar[None] = None

    def describe(self) -> str:
        """See BatchSource."""
        return ""

    def check_available(self) -> None:
        """See BatchSource."""

    def make_loader(self, parts: LoaderParts) -> Loader:
        """See BatchSource."""
        config, device = self.plan.config, World.current().device
        # The matrix units of a GPU work on tiles, and a kernel that is compiled for a length is used again.
        multiple = config.data.pad_to_multiple_of or (64 if device.type == "cuda" else 1)

        def pad(batch: Batch) -> Batch:
            return batch.pad_to_multiple(multiple, config.data.max_length).with_positions(shift=self.plan.method.shift)

        requesting = with_requests(parts.loader, parts.teacher)
        return PrefetchingLoader(requesting, steps=config.train.steps, device=device, transform=pad)

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """See BatchSource."""
        return []
