"""Examples as columns of numbers in Arrow files: an example is made of its row only when it is asked for.

    0.arrow     the examples of the first split; each piece that was tokenized together is one record batch
    0.json      what is not numbers, such as the texts of a split that is scored

All ranks of a node share the pages of a mapped file, so a set of tokens is in the memory of a node once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmdistill.data.store import reading
from llmdistill.files import read_json, write_json
from llmdistill.progress import Activity

Item = TypeVar("Item")
Element = TypeVar("Element")

AT_ONCE = 1000
"""Number of examples that are tokenized and then written together."""

TOKEN_IDS = "token ids"
"""The type of a column of token ids, which are kept in the smallest numbers that hold the vocabulary."""


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


@dataclass(frozen=True, kw_only=True)
class Layout(Generic[Item]):
    """How examples of one kind are kept: each column has the numbers of their attribute of the same name."""

    make: Callable[..., Item]
    """Makes an example of its row, given by name: an array for a list, None for a column that the examples lack."""
    columns: Mapping[str, Any]
    """The type of each column: TOKEN_IDS, one of Arrow's, or None for the type that the numbers have. The first column
    has a number for each token."""


class MappedItems(LazyItems[Item]):
    """Examples in an Arrow file, which is mapped into memory."""

    def __init__(self, file: Path, layout: Layout[Item]) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        # Row by row from Arrow itself: a row of datasets.Dataset costs 40 µs, this one 5 µs.
        self._columns = {name: table[name] for name in layout.columns}
        self._tokens = table[0]
        self._make = layout.make

    def __len__(self) -> int:
        return len(self._tokens)

    def _item(self, place: int) -> Item:
        return self._make(**{name: _numbers(column[place]) for name, column in self._columns.items()})

    def length(self, index: int) -> int:
        """The number of tokens of an example, which are not read for it."""
        return len(self._tokens[index])

    def distinct(self, name: str) -> list[Any]:
        """The values of a column, each once."""
        return list(self._columns[name].unique().to_pylist())

    @property
    def longest(self) -> int:
        """The largest number of tokens of an example."""
        return int(pc.max(pc.list_value_length(self._tokens)).as_py())


def _numbers(value: Any) -> Any:
    """A list of Arrow as an array that may be written to, because torch warns of others; other values as Python's."""
    if value.is_valid and pa.types.is_list(value.type):
        return np.from_dlpack(value.values).copy()  # to_numpy would import pandas, on every rank
    return value.as_py()


class Grouped(LazyItems[list[Item]]):
    """So many neighboring examples at a time, such as the three of a triple."""

    def __init__(self, items: MappedItems[Item], size: int) -> None:
        self._items = items
        self._size = size

    def __len__(self) -> int:
        return len(self._items) // self._size

    def _item(self, place: int) -> list[Item]:
        return self._items[place * self._size : (place + 1) * self._size]

    def length(self, index: int) -> int:
        """The number of tokens of the longest of them, to which the others are padded."""
        return max(self._items.length(place) for place in range(index * self._size, (index + 1) * self._size))


class SplitWriter:
    """Writes the splits of a data set into a folder, piece by piece, so that they may be larger than memory."""

    def __init__(self, folder: Path, token_ids: np.dtype[Any]) -> None:
        """`token_ids` is the type of token ids."""
        self._folder = folder
        self._token_ids = pa.list_(pa.from_numpy_dtype(token_ids))
        self._splits: list[str] = []

    def add(self, split: str, pieces: Iterable[Sequence[Item]], layout: Layout[Item]) -> None:
        """Write the examples of a split, in one or more pieces; the first decides the types of the columns."""
        batches = (self._batch(items, layout) for items in pieces)
        first = next(batches)
        with pa.ipc.new_file(str(self._file(split, "arrow")), first.schema) as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)

    def _batch(self, items: Sequence[Item], layout: Layout[Item]) -> pa.RecordBatch:
        columns = {}
        for name, kind in layout.columns.items():
            values = [getattr(item, name) for item in items]
            flat = [each.ravel() if isinstance(each, np.ndarray) else each for each in values]
            columns[name] = pa.array(flat, self._token_ids if kind is TOKEN_IDS else kind)
        return pa.record_batch(columns)

    def add_text(self, split: str, value: Any) -> None:
        """Write what is not numbers, as JSON; it is read when it is asked for."""
        write_json(self._file(split, "json"), value)

    def _file(self, split: str, ending: str) -> Path:
        """The file of a split, which is named by the number of the split."""
        if split not in self._splits:
            self._splits.append(split)
        return self._folder / f"{self._splits.index(split)}.{ending}"

    def record(self) -> dict[str, Any]:
        """Return what `StoredSplits` reads of meta.json."""
        return {"splits": self._splits}


class StoredSplits:
    """The splits of a data set that a SplitWriter has written, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        """`meta` is the content of meta.json. Raises UserError if it is damaged."""
        self._folder = folder
        with reading(folder) as self.meta:
            self._splits = self.meta["splits"]

    def items(self, split: str, layout: Layout[Item]) -> MappedItems[Item]:
        """Return the examples of a split. Raises UserError if they are damaged."""
        with reading(self._folder):
            return MappedItems(self._file(split, "arrow"), layout)

    def text(self, split: str) -> Any:
        """Read what `SplitWriter.add_text` has written."""
        return read_json(self._file(split, "json"))

    def _file(self, split: str, ending: str) -> Path:
        return self._folder / f"{self._splits.index(split)}.{ending}"


def in_pieces(elements: Iterable[Element], size: int | None = None) -> Iterator[list[Element]]:
    """Cut elements into lists of `size`, by default of as many as are tokenized together; the last may be shorter."""
    remaining = iter(elements)
    with Activity("Tokenizing", unit="examples") as activity:
        while piece := list(islice(remaining, size or AT_ONCE)):
            yield piece
            activity.advance(len(piece))
