"""Which examples a step learns: a pure function of seed and step, whatever the ranks and micro batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from llmdistill.batch import Batch

Item = TypeVar("Item", bound=Sized)
"""An example; its length is its number of tokens."""
Element = TypeVar("Element")

_WINDOW_ORDER = 3  # keeps these random numbers apart from those of epochs, sequences and answers

_SMALLEST_SHARE = 4
"""A window is at most this part of the data set. Examples of the same length stand side by side in it, so one that came
twice, from two epochs, would be learnt twice in one step."""


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


def bucket(window: Sequence[Item], *, seed: int, step: int, bucket_steps: int) -> list[Item]:
    """The global batch of a step out of its window, the longest example first.

    The window holds the examples of `bucket_steps` successive steps, the first of them a multiple of `bucket_steps`.
    They are sorted by length and cut into as many global batches, which come in a random order that follows from seed
    and step. With bucket_steps 1 the step keeps its examples and only sorts them.
    """
    size, rest = divmod(len(window), bucket_steps)
    assert rest == 0, "the window does not divide into global batches"
    number, offset = divmod(step, bucket_steps)
    taken = np.random.default_rng((seed, number, _WINDOW_ORDER)).permutation(bucket_steps)[offset]
    ordered = sorted(window, key=len, reverse=True)  # stable: equally long ones stay in the order of the epoch
    return ordered[taken * size : (taken + 1) * size]


def rank_micro_batches(
    batch: Sequence[Element], *, rank: int, world_size: int, micro_batch_size: int, spread: bool = False
) -> list[list[Element]]:
    """The micro batches of one rank, in order; len(batch) = micro_batch_size x world_size x accumulation.

    Neighbours in the global batch stand together in a micro batch, and the micro batches of all ranks at an
    accumulation step are neighbours: of a sorted batch the ranks have about the same work. With `spread` the examples
    are dealt out in turn instead, so that every micro batch has short and long ones and all are about equally large,
    as suits packing.
    """
    stride = micro_batch_size * world_size
    assert len(batch) % stride == 0, "the global batch does not divide into micro batches and ranks"
    if spread:
        parts = len(batch) // micro_batch_size
        return [list(batch[part::parts]) for part in range(rank, parts, world_size)]
    starts = range(rank * micro_batch_size, len(batch), stride)
    return [list(batch[start : start + micro_batch_size]) for start in starts]


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
        bucket_steps: int = 1,
        spread: bool = False,
    ) -> None:
        """Nothing is made before it is asked for.

        Args:
            items: the examples.
            pad_token_id: the padding.
            seed: of the order.
            global_batch_size: examples of a step.
            micro_batch_size: examples of a micro batch.
            rank: this process.
            world_size: all processes.
            collate: makes a batch of some items and the padding token.
            bucket_steps: successive steps whose examples are sorted by length together; see `bucket`. Of a small data
                set it is fewer.
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
