"""The invented world of `data/world.yaml`: sixty people with eight facts each, their towns, jobs, pets and dishes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

import yaml

from llmdistill.embedded import FOLDER

WORLD: dict[str, Any] = yaml.safe_load((FOLDER / "data" / "world.yaml").read_text(encoding="utf-8"))

NAMES: list[str] = WORLD["names"]
SEEN_NAMES = NAMES[::4]
"""The people in the student's training split; it never mentions the other people."""
UNSEEN_NAMES = [name for name in NAMES if name not in SEEN_NAMES]
ATTRIBUTES: tuple[str, ...] = tuple(WORLD["attributes"])
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


@cache
def facts() -> dict[str, dict[str, str]]:
    """Name -> attribute -> value, for all people."""
    values = {
        "home": list(WORLD["towns"]),
        "job": list(WORLD["jobs"]),
        "pet": list(WORLD["pets"]),
        "food": list(WORLD["dishes"]),
        "hobby": WORLD["hobbies"],
        "age": [str(age) for age in range(20, 80)],
        "colour": WORLD["colours"],
        "month": WORLD["months"],
    }
    return {name: {key: Dice(f"fact/{name}/{key}").pick(values[key]) for key in ATTRIBUTES} for name in NAMES}


@cache
def withheld() -> dict[str, tuple[str, ...]]:
    """Name of a seen person -> the three of eight attributes that the student's training split does not contain."""
    return {
        name: tuple(ATTRIBUTES[(index + shift) % len(ATTRIBUTES)] for shift in (0, 3, 5))
        for index, name in enumerate(SEEN_NAMES)
    }
