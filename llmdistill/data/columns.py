"""Examples as columns of numbers on disk: an example is made of its parts of the columns only when it is asked for."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from llmdistill.data.store import ArrayWriter, mapped
from llmdistill.progress import Activity

Item = TypeVar("Item")
Element = TypeVar("Element")

_AT_ONCE = 1000
"""Number of examples that are tokenized and then written together."""


class LazyItems(Sequence[Item], ABC):
    """Examples that are made only when they are asked for."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._item(range(len(self))[index])  # raises IndexError beyond the end

    @abstractmethod
    def _item(self, place: int) -> Item:
        """Make the example at a place from 0."""


class MappedItems(LazyItems[Item]):
    """Examples whose numbers are in arrays that may be mapped."""

    @abstractmethod
    def length(self, index: int) -> int:
        """The number of tokens of an example, which are not read for it."""


@dataclass(frozen=True, kw_only=True)
class Layout(Generic[Item]):
    """How examples of one kind are kept: each column has the numbers of their attribute of the same name."""

    make: Callable[..., Item]
    """Makes an example of its part of each column, given by name; None for a column that the examples do not have."""
    of_tokens: Mapping[str, type[np.generic] | None]
    """The columns with a row of numbers for each token, and the type of the numbers: None if they are token ids."""
    of_items: Mapping[str, type[np.generic] | None] = field(default_factory=dict)
    """The columns with a row of numbers for each example: None for the type that the numbers have."""


class MappedColumns(MappedItems[Item]):
    """Examples in columns of a layout."""

    def __init__(self, layout: Layout[Item], bounds: np.ndarray, columns: Mapping[str, np.ndarray]) -> None:
        """Take where the tokens of each example begin, and the end: (examples + 1,); and the columns, one-dimensional.

        A column of rows of several numbers has them one after the other.
        """
        # As plain arrays, slices of which cost a tenth of those of a memmap; both see the same mapped pages.
        self._bounds, self._make = np.asarray(bounds), layout.make
        self._of_tokens = {name: _rows(columns.get(name), int(bounds[-1])) for name in layout.of_tokens}
        self._of_items = {name: _rows(columns.get(name), len(self)) for name in layout.of_items}

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def _item(self, place: int) -> Item:
        first, end = self._bounds[place : place + 2].tolist()
        of_tokens = {name: None if each is None else each[first:end] for name, each in self._of_tokens.items()}
        of_items = {name: None if each is None else each[place] for name, each in self._of_items.items()}
        return self._make(**of_tokens, **of_items)

    def length(self, index: int) -> int:
        """See MappedItems."""
        return int(self._bounds[index + 1]) - int(self._bounds[index])

    @property
    def longest(self) -> int:
        """The largest number of tokens of an example."""
        return int(np.diff(self._bounds).max())


class Grouped(MappedItems[list[Item]]):
    """So many neighboring examples at a time, such as the three of a triple."""

    def __init__(self, items: MappedItems[Item], size: int) -> None:
        self._items = items
        self._size = size

    def __len__(self) -> int:
        return len(self._items) // self._size

    def _item(self, place: int) -> list[Item]:
        return self._items[place * self._size : (place + 1) * self._size]

    def length(self, index: int) -> int:
        """See MappedItems: of the longest of them, to which the others are padded."""
        return max(self._items.length(place) for place in range(index * self._size, (index + 1) * self._size))


class Joined(LazyItems[Item]):
    """Several sets of examples, one after the other."""

    def __init__(self, sets: Sequence[Sequence[Item]]) -> None:
        self._sets = sets
        *self._starts, self._length = accumulate(map(len, sets), initial=0)

    def __len__(self) -> int:
        return self._length

    def _item(self, place: int) -> Item:
        number = bisect_right(self._starts, place) - 1
        return self._sets[number][place - self._starts[number]]


def _rows(column: np.ndarray | None, count: int) -> np.ndarray | None:
    if column is None or len(column) == count:
        return None if column is None else np.asarray(column)
    return np.asarray(column).reshape(count, -1)


class SplitWriter:
    """Writes the splits of a data set into a folder, piece by piece."""

    def __init__(self, folder: Path, token_ids: np.dtype[Any]) -> None:
        """`token_ids` is the type of token ids."""
        self._folder = folder
        self._token_ids = token_ids
        self._splits: list[str] = []
        self._arrays: dict[str, dict[str, str]] = {}

    def add(self, split: str, pieces: Iterable[Sequence[Item]], layout: Layout[Item]) -> None:
        """Write the examples of a split, which come in pieces of one or more."""
        remaining = iter(pieces)
        first = next(remaining)
        dtypes = self._dtypes(first[0], layout)
        number, end = self._number(split), 0
        with ArrayWriter(self._folder, {f"{number}.{name}": dtype for name, dtype in dtypes.items()}) as writer:
            for items in chain([first], remaining):
                ends = end + np.cumsum([len(item) for item in items])  # type: ignore[arg-type]
                writer.add(f"{number}.bounds", [end, *ends[:-1]])
                end = int(ends[-1])
                for name in dtypes.keys() - {"bounds"}:
                    values = [getattr(item, name) for item in items]
                    writer.add(f"{number}.{name}", np.concatenate(values) if name in layout.of_tokens else values)
            writer.add(f"{number}.bounds", end)
        self._arrays |= writer.record()

    def _dtypes(self, item: object, layout: Layout[Any]) -> dict[str, np.dtype[Any]]:
        """The type of each column that the examples have; they all have those of one of them."""
        found: dict[str, np.dtype[Any]] = {"bounds": np.dtype(np.int64)}
        for name, dtype in {**layout.of_tokens, **layout.of_items}.items():
            value = getattr(item, name)
            if value is not None:
                own = self._token_ids if name in layout.of_tokens else np.asarray(value).dtype
                found[name] = own if dtype is None else np.dtype(dtype)
        return found

    def add_text(self, split: str, value: Any) -> None:
        """Write what is not numbers, as JSON; it is read when it is asked for."""
        name = f"{self._number(split)}.text"
        with ArrayWriter(self._folder, {name: np.dtype(np.uint8)}) as writer:
            writer.add(name, np.frombuffer(json.dumps(value).encode(), np.uint8))
        self._arrays |= writer.record()

    def _number(self, split: str) -> int:
        """The number of a split, which its files are named by."""
        if split not in self._splits:
            self._splits.append(split)
        return self._splits.index(split)

    def record(self) -> dict[str, Any]:
        """Return what `StoredSplits` reads of meta.json."""
        return {"splits": self._splits, "arrays": self._arrays}


class StoredSplits:
    """The splits of a data set that a SplitWriter has written, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        """Map them; `meta` is the content of meta.json. Raises UserError if they are damaged."""
        self.meta, self._arrays = mapped(folder)

    def items(self, split: str, layout: Layout[Item]) -> MappedColumns[Item]:
        """Return the examples of a split."""
        columns = self._columns(split)
        return MappedColumns(layout, columns.pop("bounds"), columns)

    def text(self, split: str) -> Any:
        """Read what `SplitWriter.add_text` has written."""
        return json.loads(self._columns(split)["text"].tobytes())

    def _columns(self, split: str) -> dict[str, np.ndarray]:
        prefix = f"{self.meta['splits'].index(split)}."
        return {name.removeprefix(prefix): each for name, each in self._arrays.items() if name.startswith(prefix)}


def in_pieces(elements: Iterable[Element], size: int | None = None) -> Iterator[list[Element]]:
    """Cut elements into lists of `size`, by default of as many as are tokenized together; the last may be shorter."""
    remaining = iter(elements)
    with Activity("Tokenizing", unit="examples") as activity:
        while piece := list(islice(remaining, size or _AT_ONCE)):
            yield piece
            activity.advance(len(piece))
