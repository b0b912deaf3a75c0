"""Chooses the examples of each step: a pure function of seed and step, for any number of ranks and micro batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from llmdistill.batch import Batch

Item = TypeVar("Item", bound=Sized)
"""An example; its length is its number of tokens."""
Element = TypeVar("Element")

_WINDOW_ORDER = 3  # separates these random numbers from those of epochs, sequences and answers

_SMALLEST_SHARE = 4
"""A window is at most this part of the data set. Examples of the same length are side by side in a window, so an
example that occurs twice in it, from two epochs, would be learnt twice in one step."""


def global_batch_indices(*, seed: int, step: int, dataset_size: int, global_batch_size: int) -> list[int]:
    """Indices of the examples of a step (from 0), over all ranks and micro batches, in order.

    Each epoch goes through the data set in a new permutation; a batch may contain examples of two epochs, so no example
    is left out.
    """
    assert dataset_size > 0
    assert step >= 0
    first = step * global_batch_size
    places = (divmod(place, dataset_size) for place in range(first, first + global_batch_size))
    return [int(_permutation(seed, epoch, dataset_size)[offset]) for epoch, offset in places]


@lru_cache(maxsize=4)  # a batch needs one or two epochs; a new permutation costs O(data set)
def _permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def bucket(window: Sequence[Item], *, seed: int, step: int, bucket_steps: int) -> list[Item]:
    """The global batch of a step, taken from its window, the longest example first.

    The window holds the examples of `bucket_steps` successive steps; the number of the first step is a multiple of
    `bucket_steps`. The examples are sorted by length and cut into `bucket_steps` global batches, whose random order
    depends on seed and step. If bucket_steps is 1, the step keeps its examples and only sorts them.
    """
    size, rest = divmod(len(window), bucket_steps)
    assert rest == 0, "the window does not divide into global batches"
    number, offset = divmod(step, bucket_steps)
    taken = np.random.default_rng((seed, number, _WINDOW_ORDER)).permutation(bucket_steps)[offset]
    ordered = sorted(window, key=len, reverse=True)  # stable: examples of equal length stay in the order of the epoch
    return ordered[taken * size : (taken + 1) * size]


def rank_micro_batches(
    batch: Sequence[Element], *, rank: int, world_size: int, micro_batch_size: int, spread: bool = False
) -> list[list[Element]]:
    """The micro batches of one rank, in order; len(batch) = micro_batch_size x world_size x accumulation.

    Neighbours in the global batch are in the same micro batch, and the micro batches of all ranks at one accumulation
    step are neighbours, so with a sorted batch the ranks have about the same work. With `spread` the examples are dealt
    out in turn instead, so that every micro batch has short and long examples and all micro batches have about the same
    number of tokens, which suits packing.
    """
    stride = micro_batch_size * world_size
    assert len(batch) % stride == 0, "the global batch does not divide into micro batches and ranks"
    if spread:
        parts = len(batch) // micro_batch_size
        return [list(batch[part::parts]) for part in range(rank, parts, world_size)]
    starts = range(rank * micro_batch_size, len(batch), stride)
    return [list(batch[start : start + micro_batch_size]) for start in starts]


class TrainLoader(Generic[Item]):
    """The batches of one rank, by step. The loader has no state, so a resumed run needs only the step."""

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
        bucket_steps: int = 1,
        spread: bool = False,
    ) -> None:
        """Store the settings; batches are made only when they are requested.

        Args:
            items: the examples.
            pad_token_id: the id of the padding token.
            seed: the seed of the order.
            global_batch_size: the number of examples of a step.
            micro_batch_size: the number of examples of a micro batch.
            rank: the rank of this process.
            world_size: the number of processes.
            collate: makes a batch from some items and the id of the padding token.
            bucket_steps: the number of successive steps whose examples are sorted by length together; see `bucket`. It
                is reduced for a small data set.
            spread: whether each micro batch has examples of all lengths; see `rank_micro_batches`.
        """
        self.items = items
        self.collate = collate
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.bucket_steps = max(1, min(bucket_steps, len(items) // (_SMALLEST_SHARE * global_batch_size)))
        self.spread = spread

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step (from 0), each (B, T) with B = micro_batch_size, fewer rows if packed."""
        return [self.collate(items, self.pad_token_id) for items in self.micro_batch_items(step)]

    def micro_batch_items(self, step: int) -> list[list[Item]]:
        """The examples of each of this rank's micro batches of a step, in order."""
        indices = global_batch_indices(
            seed=self.seed,
            step=step // self.bucket_steps,
            dataset_size=len(self.items),
            global_batch_size=self.bucket_steps * self.global_batch_size,
        )
        window = [self.items[index] for index in indices]
        batch = bucket(window, seed=self.seed, step=step, bucket_steps=self.bucket_steps)
        return rank_micro_batches(
            batch,
            rank=self.rank,
            world_size=self.world_size,
            micro_batch_size=self.micro_batch_size,
            spread=self.spread,
        )
