"""Random choices that are the same in every Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Dice:
    """Seeded random choices that use only `Random.random`.

    Python guarantees the sequence of `Random.random` for a given seed; `choice`, `sample` and `shuffle` may change.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def below(self, stop: int) -> int:
        """An integer from 0 to stop - 1."""
        return int(self._random.random() * stop)

    def between(self, first: int, last: int) -> int:
        """An integer from first to last, both included."""
        return first + self.below(last - first + 1)

    def chance(self, probability: float) -> bool:
        """True with the given probability."""
        return self._random.random() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        """One of the items at random."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items, in random order."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """All the items, in random order."""
        return self.sample(items, len(items))
