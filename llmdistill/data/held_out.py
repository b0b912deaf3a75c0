"""Rows of a training set that a run keeps from its training, to compare its models on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from llmdistill.data.store import JoinedItems, MappedItems
from llmdistill.errors import UserError

Item = TypeVar("Item")

MOST, LEAST = 200, 8
"""Rows that a share holds out at most, and at least if these are no more than a quarter of the set."""
_STREAM = 0x4E1D
"""Keeps the draw of these rows apart from other draws of the same seed."""


class KeptItems(Sequence[Item]):
    """The examples of a file that are learned; only their places are in memory."""

    def __init__(self, items: MappedItems[Item], places: np.ndarray) -> None:
        self._items = items
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        places = self._places[index]
        return [self._items[int(place)] for place in places] if isinstance(index, slice) else self._items[int(places)]

    def length(self, index: int) -> int:
        """Return the number of tokens of an example, without reading them."""
        return self._items.length(int(self._places[index]))

    def distinct(self, name: str) -> list[Any]:
        return self._items.distinct(name)


def count_held_out(wanted: float, total: int) -> int:
    """Return how many of so many rows are held out for a setting of data.held_out: a share below 1, or a number.

    Raises:
        UserError: nothing would be left to learn.
    """
    if wanted < 1:
        share = max(LEAST, round(wanted * total)) if wanted > 0 else 0
        return min(share, MOST, total // 4)
    if wanted >= total:
        raise UserError(f"data.held_out is {wanted:g}, but data.train has {total:,} rows: give fewer, or a share")
    return round(wanted)


def hold_out(
    parts: Sequence[MappedItems[Item]], wanted: float, seed: int
) -> tuple[Sequence[MappedItems[Item] | KeptItems[Item]], list[Item]]:
    """Return the files of a training set without the rows that are held out, and these rows, by seed."""
    joined: JoinedItems[Item] = JoinedItems(parts)
    count = count_held_out(wanted, len(joined))
    if not count:
        return parts, []
    drawn = np.sort(np.random.default_rng((seed, _STREAM)).choice(len(joined), size=count, replace=False))
    kept, start = list[MappedItems[Item] | KeptItems[Item]](), 0
    for part in parts:
        places = np.setdiff1d(np.arange(start, start + len(part)), drawn) - start
        # A file may be so small that all of it would be held out; it is learned then.
        kept.append(KeptItems(part, places) if len(places) else part)
        start += len(part)
    return kept, [joined[int(index)] for index in drawn]
