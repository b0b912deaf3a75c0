"""Where the batches of a training come from: from the data as they are here, and in `own_answers` from the student."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Batch, Loader
from llmdistill.data.sampler import PrefetchingLoader
from llmdistill.runtime.distributed import World
from llmdistill.step.teacher import Teacher, with_requests
from llmdistill.training.callbacks.base import Callback
from llmdistill.training.own_answers import StudentBatches
from llmdistill.training.plan import Plan
from llmdistill.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class LoaderParts:
    """What the loader of the training loop is made from."""

    loader: Any
    """The data's own loader; a `StepLoader` if the student answers its prompts."""
    teacher: Teacher | None
    engine: Any
    """The student's."""
    tokenizer: PreTrainedTokenizerBase
    save: Callable[[Path], None]
    """Saves the engine's student in a folder; every rank must call it."""


class BatchSource(Protocol):
    """Where the batches of a run come from, and what else the run needs for that."""

    def describe(self) -> str:
        """Return what the first lines of the run add to its data."""
        ...

    def check_there(self) -> None:
        """Raise a UserError if a server that makes the batches is not there, or is another one than is needed."""
        ...

    @property
    def asks_server(self) -> bool:
        """Whether a server takes part in making the batches."""
        ...

    @property
    def student_copy(self) -> Path | None:
        """A folder in that of the run, with a copy of the student that is only needed during the training."""
        ...

    def make_loader(self, parts: LoaderParts) -> Loader:
        """Return the loader of the training loop; a teacher that answers later gets a batch as soon as it is made."""
        ...

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """Return the callbacks that watch how good the batches are."""
        ...


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

    def check_there(self) -> None:
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
