"""The interface of a teacher for a step: a model that runs here, a cache, a server, or several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from llmdistill.batch import Batch, Loader, Outputs, Positions
from llmdistill.step.forward import TappedModel


class Teacher(Protocol):
    """A teacher. `TappedModel` is the one that runs here; the others are files of `teachers/`, which inherit this."""

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return, for a batch, the taps, and the inputs of the distributions at these kinds of positions."""
        ...

    @property
    def live(self) -> Mapping[str, TappedModel]:
        """The models that run here, by what a note calls them; none where the outputs come from elsewhere."""
        return {}

    def retokenize(self, batch: Batch) -> Batch:
        """Return the batch of the student as the teacher reads it, in other tokens if it has another tokenizer."""
        return batch


class AsyncTeacher(Teacher):
    """A teacher elsewhere: its answers are requested as soon as a batch is made, before the step that needs them."""

    def request(self, batch: Batch) -> Batch:
        """Request the answers for a batch; returns the batch with the answers to come."""
        raise NotImplementedError

    def wait(self, batches: Iterable[Batch]) -> None:
        """Wait for the answers that were requested for batches; raises UserError if one does not come."""
        raise NotImplementedError


def live_models(teacher: Teacher | None) -> Mapping[str, TappedModel]:
    """Return the models of a teacher that run here, by what a note calls them."""
    return {} if teacher is None else teacher.live


@dataclass(frozen=True)
class RequestingLoader:
    """A loader that requests a teacher's answers for its batches as soon as they are made."""

    loader: Loader
    request: Callable[[Batch], Batch]

    def micro_batches(self, step: int) -> list[Batch]:
        """See Loader."""
        return [self.request(batch) for batch in self.loader.micro_batches(step)]


def with_requests(loader: Loader, teacher: Teacher | None) -> Loader:
    """Return a loader whose batches a teacher that answers later gets as soon as they are made."""
    return RequestingLoader(loader, teacher.request) if isinstance(teacher, AsyncTeacher) else loader
