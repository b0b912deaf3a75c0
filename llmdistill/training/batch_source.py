"""The protocol of what gives the batches of a training, and what their loader is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Loader
from llmdistill.step.teacher import Teacher
from llmdistill.training.callbacks.base import Callback
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

    def check_available(self) -> None:
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
