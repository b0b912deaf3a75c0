"""Which examples a step learns: a pure function of seed and step, whatever the ranks and micro batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from llmdistill.batch import Batch

Item = TypeVar("Item")


def global_batch_indices(*, seed: int, step: int, dataset_size: int, global_batch_size: int) -> list[int]:
    """Indices of the examples of a step (from 0), over all ranks and micro batches, in order.

    The data set is walked in a fresh permutation each epoch; a batch may straddle epochs, so none is left out.
    """
    assert dataset_size > 0
    assert step >= 0
    first = step * global_batch_size
    places = (divmod(place, dataset_size) for place in range(first, first + global_batch_size))
    return [int(_permutation(seed, epoch, dataset_size)[offset]) for epoch, offset in places]


@lru_cache(maxsize=4)  # a batch needs one or two epochs; making them anew each step costs O(data set)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def rank_micro_batches(indices: Sequence[int], *, rank: int, world_size: int, micro_batch_size: int) -> list[list[int]]:
    """The micro batches of one rank, in order; len(indices) = micro_batch_size x world_size x accumulation."""
    stride = micro_batch_size * world_size
    assert len(indices) % stride == 0, "the global batch does not divide into micro batches and ranks"
    starts = range(rank * micro_batch_size, len(indices), stride)
    return [list(indices[start : start + micro_batch_size]) for start in starts]


class TrainLoader(Generic[Item]):
    """The batches of one rank, by step; it has no state, so a resumed run needs only the step."""

    def __init__(
        self,
        items: Sequence[Item],
        *,
        pad_token_id: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        collate: Callable[[Sequence[Item], int], Batch],
    ) -> None:
        """`collate` makes a batch of some items and the padding token."""
        self.items = items
        self.collate = collate
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step (from 0), each (B, T) with B = micro_batch_size."""
        return [self.collate(items, self.pad_token_id) for items in self.micro_batch_items(step)]

    def micro_batch_items(self, step: int) -> list[list[Item]]:
        """The examples of each of this rank's micro batches of a step, in order."""
        indices = global_batch_indices(
            seed=self.seed,
            step=step,
            dataset_size=len(self.items),
            global_batch_size=self.global_batch_size,
        )
        parts = rank_micro_batches(
            indices, rank=self.rank, world_size=self.world_size, micro_batch_size=self.micro_batch_size
        )
        return [[self.items[i] for i in part] for part in parts]
