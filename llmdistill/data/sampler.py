"""Chooses the examples of each step: a pure function of seed and step, for any number of ranks and micro batches.

Also prepares the batches of the next step while the device computes the current step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from llmdistill.batch import IGNORE_INDEX, Batch, Loader
from llmdistill.data.random_streams import MIXTURE, WINDOW

Item = TypeVar("Item", bound=Sized)
"""An example; its length is its number of tokens."""
Element = TypeVar("Element")

_MIN_WINDOWS = 4
"""An epoch has at least so many windows. Examples of the same length are side by side in a window, so an example that
occurs twice in it, from two epochs, would be learned twice in one step."""


@dataclass(frozen=True)
class Mixture:
    """Several files of examples that are drawn with weights.

    An epoch has as many examples as there are in all files, and of each file the share of its weight. Each file goes
    through all of its own examples before one of them comes again, however many epochs that takes.
    """

    sizes: tuple[int, ...]
    """The numbers of examples of the files, which stand one after the other."""
    counts: tuple[int, ...]
    """How many of them an epoch has."""

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float]) -> Mixture:
        return cls(tuple(sizes), tuple(share_out(sum(sizes), weights)))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the indices of the examples of an epoch, in order."""
        drawn, start = [], 0
        for number, (size, count) in enumerate(zip(self.sizes, self.counts, strict=True)):
            # Places count through the file's own epochs without end, so an epoch of the mixture continues in a file
            # where the one before stopped.
            places = np.arange(epoch * count, (epoch + 1) * count)
            for own_epoch in range(places[0] // size, places[-1] // size + 1):
                own = np.random.default_rng((seed, own_epoch, number, MIXTURE)).permutation(size)
                drawn.append(start + own[places[places // size == own_epoch] % size])
            start += size
        return np.random.default_rng((seed, epoch)).permutation(np.concatenate(drawn))


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Return how many of the examples of an epoch each part gives, by its weight; they add up to the total.

    The largest remainders are rounded up, and each part gives at least one.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [max(1, math.floor(share)) for share in exact]
    # The largest remainders first.
    order = sorted(range(len(weights)), key=lambda number: counts[number] - exact[number])
    for number in order[: max(0, total - sum(counts))]:
        counts[number] += 1
    while sum(counts) > total:  # because tiny parts got their one example
        # From the largest part, whose share changes least.
        counts[counts.index(max(counts))] -= 1
    return counts


def global_batch_indices(
    *, seed: int, step: int, dataset_size: int, global_batch_size: int, mixture: Mixture | None = None
) -> list[int]:
    """Return the indices of the examples of a step (from 0), over all ranks and micro batches, in order.

    Each epoch goes through the data set in a new permutation; a batch may contain examples of two epochs, so no example
    is left out. With a mixture, which has dataset_size examples, an epoch is one of the mixture.
    """
    # Examples are counted through the epochs without end.
    first = step * global_batch_size
    places = (divmod(place, dataset_size) for place in range(first, first + global_batch_size))
    return [int(permute(seed, epoch, dataset_size, mixture)[offset]) for epoch, offset in places]


@lru_cache(maxsize=4)  # a batch needs one or two epochs; a new permutation costs O(data set)
def permute(seed: int, epoch: int, size: int, mixture: Mixture | None) -> np.ndarray:
    """Return the order of the examples in an epoch, (size,)."""
    if mixture is not None:
        order = mixture.order(seed, epoch)
    else:
        order = np.random.default_rng((seed, epoch)).permutation(size)
    return order.astype(np.int32) if size < 2**31 else order  # every rank holds it


def bucket(
    window: Sequence[Element], *, seed: int, step: int, bucket_steps: int, length: Callable[[Any], int] = len
) -> list[Element]:
    """Return the global batch of a step from its window, the longest example first.

    The window holds the examples of `bucket_steps` successive steps; the number of the first step is a multiple of
    `bucket_steps`. The examples are sorted by length and cut into `bucket_steps` global batches, whose random order
    depends on seed and step. `length` returns the number of tokens of an example.
    """
    size, rest = divmod(len(window), bucket_steps)
    assert rest == 0, "the window does not divide into global batches"
    number, offset = divmod(step, bucket_steps)
    chosen = np.random.default_rng((seed, number, WINDOW)).permutation(bucket_steps)[offset]
    # sorted is stable: examples of equal length stay in the order of the epoch.
    ordered = sorted(window, key=length, reverse=True)
    return ordered[chosen * size : (chosen + 1) * size]


@dataclass(frozen=True, kw_only=True)
class Share:
    """This rank's share of the batches, and how the examples of a step are chosen and dealt out."""

    seed: int
    """The seed of the order."""
    global_batch_size: int
    """The number of examples of a step, over all ranks: micro_batch_size x world_size x accumulation."""
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    bucket_steps: int = 1
    """The examples of so many successive steps are sorted by length together; see `bucket`."""
    spread: bool = False
    """Whether neighbors among the examples of a step go to different micro batches: each then has short and long ones,
    of which packing makes rows of about the same number of tokens."""

    def micro_batches(self, batch: Sequence[Element]) -> list[list[Element]]:
        """Return this rank's micro batches of a global batch, in order.

        Unless `spread`, neighbors in the global batch are in the same micro batch, and the micro batches of all ranks
        at one accumulation step are neighbors, so with a sorted batch the ranks have about the same work.
        """
        size, stride = self.micro_batch_size, self.micro_batch_size * self.world_size
        assert len(batch) % stride == 0, "the global batch does not divide into micro batches and ranks"
        if self.spread:
            parts = len(batch) // size
            return [list(batch[part::parts]) for part in range(self.rank, parts, self.world_size)]
        return [list(batch[start : start + size]) for start in range(self.rank * size, len(batch), stride)]


class StepLoader(ABC, Generic[Element]):
    """The batches of one rank, by step.

    The order depends on the seed and the step, not on ranks or micro batches, so a resumed run needs only the step.
    """

    def __init__(self, share: Share, collate: Callable[[list[Element]], Batch]) -> None:
        self.share = share
        self.collate = collate

    @abstractmethod
    def global_batch(self, step: int) -> list[Any]:
        """Return the examples of a step (from 0), or their indices, over all ranks, the longest example first."""

    @abstractmethod
    def keys(self, step: int) -> Sequence[Hashable]:
        """Say which examples `global_batch` has, in its order: the same ones have the same keys in every epoch."""

    @abstractmethod
    def ended(self, examples: int, fresh: int) -> bool:
        """Return whether the set has no other example, after so many of which the last step had so many new ones."""

    def once(self, wanted: int) -> list[list[Element]]:
        """Return the first examples of the steps, each once, until there are as many as `wanted` or no others.

        They are in lists of a step each, of which one rank has all. In training a small set comes again and again.
        """
        assert self.share.world_size == 1, "the examples of a step are divided among ranks"
        seen, steps, step = set[Hashable](), list[list[Element]](), 0
        while len(seen) < wanted:
            fresh = list[Element]()
            for key, item in zip(self.keys(step), chain.from_iterable(self.micro_batch_items(step)), strict=True):
                if key not in seen:
                    seen.add(key)
                    fresh.append(item)
            steps += [fresh] if fresh else []
            step += 1
            if self.ended(step * self.share.global_batch_size, len(fresh)):
                break
        return steps

    def micro_batch_items(self, step: int) -> list[list[Element]]:
        """Return the examples of each of this rank's micro batches of a step, in order."""
        return self.share.micro_batches(self.global_batch(step))

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro batches of a step, each (B, T) with B = micro_batch_size, fewer rows if packed."""
        return [self.collate(items) for items in self.micro_batch_items(step)]


class TrainLoader(StepLoader[Item]):
    """The batches of the examples of a sequence, which may be mapped into memory. The loader has no state."""

    def __init__(
        self,
        items: Sequence[Item],
        share: Share,
        collate: Callable[[list[Item]], Batch],
        *,
        mixture: Mixture | None = None,
    ) -> None:
        """Store the examples; batches are made only when they are requested, and only this rank's examples are read.

        The share's `bucket_steps` are reduced for a small data set. Mapped examples tell their numbers of tokens by a
        method `length`; those of others are measured.
        """
        super().__init__(share, collate)
        self.items = items
        self.mixture = mixture
        self.bucket_steps = max(1, min(share.bucket_steps, len(items) // (_MIN_WINDOWS * share.global_batch_size)))
        self._length = getattr(items, "length", lambda index: len(items[index]))

    def global_batch(self, step: int) -> list[int]:
        """See StepLoader: the indices of the examples."""
        window = global_batch_indices(
            seed=self.share.seed,
            # A window is one step of a global batch that is so many times as large.
            step=step // self.bucket_steps,
            dataset_size=len(self.items),
            global_batch_size=self.bucket_steps * self.share.global_batch_size,
            mixture=self.mixture,
        )
        return bucket(window, seed=self.share.seed, step=step, bucket_steps=self.bucket_steps, length=self._length)

    def keys(self, step: int) -> Sequence[Hashable]:
        return self.global_batch(step)

    def ended(self, examples: int, fresh: int) -> bool:
        # The last window of an epoch, whose steps are shuffled, goes on into the next one.
        return examples >= len(self.items) + self.bucket_steps * self.share.global_batch_size

    def micro_batch_items(self, step: int) -> list[list[Item]]:
        indices = self.share.micro_batches(self.global_batch(step))
        return [[self.items[index] for index in part] for part in indices]


class SequenceSet(Protocol):
    """The sequences of a training set, each made anew in every epoch, with masks or pairs of its own.

    They are counted through the epochs without end: a place is epoch * number of sequences + index.
    """

    def __len__(self) -> int: ...

    def length(self, place: int) -> int:
        """Return the number of tokens at a place, by which the sequences of a step are sorted."""

    def key(self, place: int, seed: int) -> Hashable:
        """Return what the sequences of the same piece of text have in common in all epochs."""

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        """Return the sequences at these places, (B, T), a pure function of place and seed."""


class SequenceLoader(StepLoader[int]):
    """The batches of one rank, by step, of sequences that are made anew in every epoch. The loader has no state.

    Each epoch has its own order of the sequences. A batch may contain sequences of two epochs.
    """

    def __init__(self, sequences: SequenceSet, share: Share) -> None:
        super().__init__(share, lambda places: sequences.batch(places, share.seed))
        self.sequences = sequences

    def global_batch(self, step: int) -> list[int]:
        """See StepLoader: the places of the sequences."""
        size, share = len(self.sequences), self.share
        indices = global_batch_indices(
            seed=share.seed, step=step, dataset_size=size, global_batch_size=share.global_batch_size
        )
        first = step * share.global_batch_size
        places = [(first + offset) // size * size + index for offset, index in enumerate(indices)]
        return sorted(places, key=self.sequences.length, reverse=True)

    def keys(self, step: int) -> Sequence[Hashable]:
        return [self.sequences.key(place, self.share.seed) for place in self.global_batch(step)]

    def ended(self, examples: int, fresh: int) -> bool:
        return examples >= len(self.sequences)


class PrefetchingLoader:
    """A loader that prepares the micro batches of the next step in a thread while the caller uses the current ones.

    The batches are the same as without prefetching. An exception in the thread is raised when the caller asks for the
    step. The thread is idle between steps and ends with the loader, or with the process.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        steps: int,
        device: torch.device,
        transform: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        """Wrap a loader whose batches depend on the step alone; from now on no other code may ask it for batches.

        No batches are prepared beyond `steps`, the steps of the run. `transform` is applied to each batch, on the CPU.
        For a GPU the batches are in pinned memory, from which it copies asynchronously.
        """
        self._loader = loader
        self._steps = steps
        self._device = device
        self._transform = transform
        # One thread makes all batches, in the order in which they are requested, because a loader may have a position
        # in a stream.
        self._thread = ThreadPoolExecutor(1, "batches")
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro batches of a step; make them now if they are not prepared, as when a run begins."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            batches = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].cancel()  # no effect if the thread has begun; then its result is dropped
            batches = self._thread.submit(self._make_batches, step).result()
        if step + 1 < self._steps:
            self._ahead = step + 1, self._thread.submit(self._make_batches, step + 1)
        return batches

    def _make_batches(self, step: int) -> list[Batch]:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else the thread of every rank would pin memory through the first GPU
        batches = []
        for batch in map(self._transform, self._loader.micro_batches(step)):
            pinned: dict[str, Any] = {}
            if self._device.type == "cuda":
                values = {field.name: getattr(batch, field.name) for field in fields(batch)}
                pinned = {name: value.pin_memory() for name, value in values.items() if isinstance(value, Tensor)}
            batches.append(replace(batch, **pinned))
        return batches


def scoring_batches(
    items: Sequence[Item],
    collate: Callable[[list[Item]], Batch],
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[tuple[list[int], Batch]]:
    """Return one rank's batches of a set, the shortest examples first, each with the indices of its examples.

    All ranks get the same number of batches, because a sharded model needs all ranks in every forward pass. A rank with
    one batch less repeats the first batch, without indices, labels and targets, so that no example counts twice.
    """
    # Batches of similar length need little padding.
    order = sorted(range(len(items)), key=lambda index: len(items[index]))
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    share = [(part, collate([items[index] for index in part])) for part in parts[rank::world_size]]
    if len(share) < -(-len(parts) // world_size):
        filler = collate([items[index] for index in parts[0]])
        labels, targets = torch.full_like(filler.labels, IGNORE_INDEX), filler.targets
        if targets is not None:
            targets = torch.full_like(targets, float("nan") if targets.is_floating_point() else IGNORE_INDEX)
        share.append(([], replace(filler, labels=labels, targets=targets)))
    return share
