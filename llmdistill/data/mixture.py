"""A mixture of texts, such as one for each language, in which small texts are sampled more often than their share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from llmdistill.batch import Batch
from llmdistill.data.text import TextInputs, TextSequences

_STRIDE = 5  # separates these random numbers from those of epochs, sequences, windows, documents and answers


class MixedSequences:
    """The sequences of several texts; like those of one text, each is a pure function of seed, epoch and index.

    Text i with n_i of the N sequences is sampled with probability q_i = n_i^a / (n_1^a + n_2^a + ...) for the exponent
    a (XLM, Lample and Conneau 2019, section 3.1; XLM-R takes a = 0.3). An epoch has N sequences, of which N q_i are
    from text i, so that the shares are exact in every epoch and not only in the mean. Each text goes through all of its
    own sequences before one of them comes again, however many epochs that takes, and in an order of its own, so that
    also the first epoch sees all regions of a large text.
    """

    def __init__(self, parts: Mapping[str, TextSequences], exponent: float) -> None:
        """Choose the number of sequences of each part in an epoch; the parts have the same settings and tokenizer."""
        self.names = list(parts)
        self.parts = list(parts.values())
        sizes = [len(part) for part in self.parts]
        self.counts = mixture_counts(sizes, exponent)
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        """The number of sequences of an epoch: that of all texts."""
        return int(self._ends[-1])

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        """The sequences at these places, as in `TextSequences.batch`."""
        return self.parts[0].collate([self._read(seed, *divmod(place, len(self))) for place in places])

    def length(self, place: int) -> int:
        """The number of tokens at a place, see `TextSequences.length`."""
        return self.parts[0].length(place)

    def _read(self, seed: int, epoch: int, index: int) -> TextInputs:
        number = int(np.searchsorted(self._ends, index, side="right"))
        part, count = self.parts[number], self.counts[number]
        own_epoch, offset = divmod(epoch * count + index - int(self._ends[number] - count), len(part))
        return part.read(seed, own_epoch, _spread(offset, len(part), (seed, own_epoch, number)), number)

    def report(self) -> str:
        """One sentence with the share of each text in the whole and in the batches."""
        total = len(self)
        shares = [
            f"{name} {len(part) / total:.1%} of the text and {count / total:.1%} of the batches"
            for name, part, count in zip(self.names, self.parts, self.counts, strict=True)
        ]
        return f"{len(shares)} parts: {', '.join(shares)}"


def mixture_counts(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return how many sequences of an epoch each text gives; they add up to the sum of the sizes.

    The largest remainders are rounded up, and each text gives at least one.
    """
    total = sum(sizes)
    weights = [size**exponent for size in sizes]
    wanted = [total * weight / sum(weights) for weight in weights]
    counts = [max(1, math.floor(each)) for each in wanted]
    order = sorted(range(len(sizes)), key=lambda number: counts[number] - wanted[number])
    for number in order[: max(0, total - sum(counts))]:
        counts[number] += 1
    while sum(counts) > total:  # where tiny texts were given their one sequence
        counts[counts.index(max(counts))] -= 1
    return counts


def _spread(offset: int, size: int, key: tuple[int, int, int]) -> int:
    """Return the index at an offset of an order of 0, 1, ... size - 1 that depends on the key.

    A step of about the golden ratio of the size spreads the first few over the whole, and costs no memory, unlike a
    permutation of a large text.
    """
    start = int(np.random.default_rng((*key, _STRIDE)).integers(size))
    step = round(size * 0.618)
    while math.gcd(step, size) != 1:
        step += 1
    return (start + offset * step) % size
