"""Rows of a training set that a run keeps from its training, and validation rows that are learned all the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llmdistill.data.collate import Encoded
from llmdistill.data.references import parts_of, text_files
from llmdistill.data.store import JoinedItems, MappedItems
from llmdistill.errors import UserError

Item = TypeVar("Item")

MOST, LEAST = 200, 8
"""Rows that a share holds out at most, and at least if these are no more than a quarter of the set."""
_STREAM = 0x4E1D
"""Keeps the draw of these rows apart from other draws of the same seed."""

_COMPARED = 20_000
"""Training rows that are compared with those of data.valid: a second's work."""
_SAYS_NOTHING = "the validation loss says nothing about new rows then; give a data.valid that is not learned"


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


def find_learned_files(train: str, valid: str) -> str | None:
    """Return a sentence if every file of data.valid, or every set of the hub, is also one of data.train; else None."""

    def names(reference: str) -> set[str]:
        names = set[str]()
        for part in parts_of(reference):
            files = text_files(part.reference)
            names |= {part.reference} if files is None else {str(Path(file).resolve()) for file in files}
        return names

    if names(valid) <= names(train):
        return f"data.valid {valid} is a part of data.train {train}: {_SAYS_NOTHING}"
    return None


def find_learned_rows(train: Sequence[Encoded], valid: Sequence[Encoded]) -> str | None:
    """Return a sentence if a tenth or more of the validation rows are also training rows; else None.

    Of a large training set only _COMPARED rows are read, so that the number is a lower bound.
    """
    places = range(0, len(train), -(-len(train) // _COMPARED) or 1)
    learned = {train[place].sample_id for place in places}
    count = sum(item.sample_id in learned for item in valid)
    if not count or count / len(valid) < 0.1 * len(places) / len(train):
        return None
    least = "" if len(places) == len(train) else "at least "
    return f"{least}{count:,} of the {len(valid):,} rows of data.valid are also in data.train: {_SAYS_NOTHING}"
