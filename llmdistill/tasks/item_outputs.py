"""The outputs of a model for each of some items, which the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import Batch, Outputs, TapRequest
from llmdistill.data.sampler import scoring_batches
from llmdistill.objective import Pooling
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, gather_objects
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder

Forward = Callable[[Batch], Outputs]
Item = TypeVar("Item", bound=Sized)
Value = TypeVar("Value")


@contextmanager
def scoring_forward(
    model: PreTrainedModel, taps: TapRequest | None = None, *, pooling: Pooling | None = None
) -> Iterator[Forward]:
    """Yield the forward pass of a model in evaluation mode, for batches on the CPU.

    `pooling` makes embeddings of its hidden states.
    """
    tapped = TappedModel(model, Recorder(model, taps or {}), pooling=pooling)
    try:
        # The positions are found on the CPU: for a batch on a GPU the host would wait.
        yield lambda batch: tapped(batch.with_positions(shift=tapped.shift).to(World.current().device))
    finally:
        tapped.remove()


@torch.no_grad()
def compute_values(
    forward: Forward,
    items: Sequence[Item],
    collate: Callable[[Sequence[Item]], Batch],
    read_values: Callable[[Tensor, Sequence[int]], Iterable[Value]],
    *,
    batch_size: int,
) -> list[Value]:
    """Return a value for each item, in order and on every rank, for any number of items.

    Every rank must call this function, and the model must be in evaluation mode. `read_values` turns
    the `sequence_logits` of a batch and the indices of its items into their values.
    """
    world = World.current()
    batches = scoring_batches(items, collate, batch_size=batch_size, rank=world.rank, world_size=world.size)
    own_values: list[tuple[int, Value]] = []
    for indices, batch in progress(batches, "Scoring", "batches"):
        logits = forward(batch).sequence_logits
        assert logits is not None, "the model has no head for sequences"
        if indices:  # a batch that only keeps the ranks in step has none
            own_values += zip(indices, read_values(logits, indices), strict=True)
    values = dict(chain.from_iterable(gather_objects(own_values)))
    return [values[index] for index in range(len(items))]  # `scoring_batches` orders them by length
