"""Tokens on disk: made once, looked up by what they were made from, and mapped into memory by every process.

CACHE/KIND/KEY/meta.json        what the tokens were made from, and their counts
CACHE/KIND/KEY/manifest.json    size of each file, and sha256
CACHE/KIND/KEY/...              the tokens: arrays of a text (`corpus`), or examples as columns of numbers:
               0.arrow          the first split; each piece that was tokenized together is one record batch
               0.json           what is not numbers, such as the texts of a split that is scored

All ranks of a node share the pages of a mapped file, so a set of tokens is in the memory of a node once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from llmdistill.artifacts import MANIFEST, manifest_damage, new_proven_folder
from llmdistill.errors import UserError
from llmdistill.files import cache_folder, read_json, write_json
from llmdistill.fingerprints import digest
from llmdistill.models.unembedded import rows_of
from llmdistill.progress import Activity

Item = TypeVar("Item")
Element = TypeVar("Element")

_META = "meta.json"

AT_ONCE = 1000
"""Number of examples that are tokenized and then written together."""
_MOST_CHARACTERS = 4_000_000
"""Of these examples; the tokenizer takes some 200 bytes for each."""

TOKEN_IDS = "token ids"
"""The type of a column of token ids, which are stored in the smallest integers that hold the vocabulary."""


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype[Any]:
    """Return the smallest type of number that holds every token id."""
    return np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of the properties that decide how a tokenizer splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decides: Any
    if backend is None:
        decides = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map]
    else:
        decides = json.loads(backend.to_str())
        # Each call of the tokenizer sets these two, so they differ before and after the first call.
        for setting in ("truncation", "padding"):
            decides.pop(setting, None)
    if rows_of(tokenizer) is not None:  # texts with the tokens beyond them are refused
        decides = [decides, rows_of(tokenizer)]
    return digest(json.loads(json.dumps(decides, default=str)))


def store(
    cache_dir: str | Path | None,
    kind: str,
    request: Mapping[str, Any],
    write: Callable[[Path], Mapping[str, Any]],
    **about: Any,
) -> Path:
    """Make the tokens of a request if they are not there, completely or not at all; return their folder.

    Damaged tokens are made again. If another process makes them in the meantime, its tokens stay.

    Args:
        cache_dir: the folder of all tokens, by default $LLMDISTILL_CACHE or ~/.cache/llmdistill.
        kind: the folder below it.
        request: everything that decides the tokens, as plain JSON values.
        write: writes the tokens into a folder, and returns more of meta.json.
        about: what meta.json tells beside the request.

    Raises:
        UserError: of `write`; or the folder cannot be written.
    """
    # 64 bits: enough to tell all sets of a machine apart.
    folder = cache_folder(cache_dir) / kind / digest(request)[:16]
    if folder.is_dir():
        if _is_undamaged(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with new_proven_folder(folder) as part:
            write_json(part / _META, {**about, **request, **write(part)})
    except UserError as error:
        if _is_undamaged(folder):
            return folder
        if not isinstance(error.__cause__, OSError):
            raise
        raise UserError(
            f"{folder}: tokens cannot be written there ({error.__cause__}); name another folder as data.cache_dir"
        ) from error
    return folder


def _is_undamaged(folder: Path) -> bool:
    """Return whether a folder has all files as they were written, for which every byte is read (near 2 GB/s)."""
    return (folder / MANIFEST).is_file() and manifest_damage(folder) is None


@contextmanager
def read_meta(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of meta.json to a block that opens the files; a UserError if they are damaged."""
    try:
        yield json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: damaged tokens in the cache ({error}); remove the folder") from error


@dataclass(frozen=True, kw_only=True)
class Schema(Generic[Item]):
    """How examples of one kind are stored: each column has the numbers of their attribute of the same name."""

    make: Callable[..., Item]
    """Makes an example from its row, passed by name: an array for a list, None for a column that the examples lack."""
    columns: Mapping[str, Any]
    """The type of each column: TOKEN_IDS, one of Arrow's, or None for the type that the numbers have. The first column
    has a number for each token."""


class MappedItems(Sequence[Item]):
    """Examples in an Arrow file, which is mapped into memory; an example is made only when it is read."""

    def __init__(self, file: Path, schema: Schema[Item]) -> None:
        table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        # Row by row from Arrow itself: a row of datasets.Dataset costs 40 µs, this one 5 µs.
        self._columns = {name: table[name] for name in schema.columns}
        # The first column of a schema has a number for each token.
        self._tokens = table[0]
        self._make = schema.make

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]  # raises IndexError beyond the end
        if isinstance(places, range):
            return [self[place] for place in places]
        values: dict[str, Any] = {}
        for name, column in self._columns.items():
            value = column[places]
            if value.is_valid and pa.types.is_list(value.type):
                # A copy, because torch warns of arrays that may not be written to; to_numpy would import pandas, on
                # every rank.
                values[name] = np.from_dlpack(value.values).copy()
            else:
                values[name] = value.as_py()
        return self._make(**values)

    def length(self, index: int) -> int:
        """Return the number of tokens of an example, without reading them."""
        return len(self._tokens[index])

    def distinct(self, name: str) -> list[Any]:
        return list(self._columns[name].unique().to_pylist())

    @property
    def longest(self) -> int:
        """The largest number of tokens of an example."""
        return int(pc.max(pc.list_value_length(self._tokens)).as_py())


class JoinedItems(Sequence[Item]):
    """The examples of several files, one after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]  # raises IndexError beyond the end
        if isinstance(places, range):
            return [self[place] for place in places]
        part, place = self._locate(places)
        return part[place]

    def length(self, index: int) -> int:
        """Return the number of tokens of an example, without reading them."""
        part, place = self._locate(index)
        return part.length(place)

    def distinct(self, name: str) -> list[Any]:
        return list(dict.fromkeys(value for part in self.parts for value in part.distinct(name)))

    def _locate(self, index: int) -> tuple[Any, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - int(self._ends[number]) + len(self.parts[number])


class ItemGroups(Sequence[list[Item]]):
    """Groups of neighboring examples, such as the three of a triple."""

    def __init__(self, items: MappedItems[Item], size: int) -> None:
        self._items = items
        self._size = size

    def __len__(self) -> int:
        return len(self._items) // self._size

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index] * self._size  # raises IndexError beyond the end
        return self._items[place : place + self._size]

    def length(self, index: int) -> int:
        """Return the number of tokens of the longest example of a group, to which the others are padded."""
        return max(self._items.length(place) for place in range(index * self._size, (index + 1) * self._size))


class SplitWriter:
    """Writes the splits of a data set into a folder, piece by piece, so that they may be larger than memory."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._folder = folder
        self._token_ids = pa.list_(pa.from_numpy_dtype(token_dtype(tokenizer)))
        self.splits: list[str] = []
        """The names of the splits, by the number that names their files; the key "splits" of meta.json."""

    def add(self, split: str, pieces: Iterable[Sequence[Item]], schema: Schema[Item]) -> None:
        """Write the examples of a split, in one or more pieces; the first decides the types of the columns."""
        writer = None
        with ExitStack() as stack:
            for items in pieces:
                columns = {}
                for name, kind in schema.columns.items():
                    values = [getattr(item, name) for item in items]
                    # A list of Arrow has one dimension; `make` gives the numbers their shape again.
                    flat = [value.ravel() if isinstance(value, np.ndarray) else value for value in values]
                    columns[name] = pa.array(flat, self._token_ids if kind is TOKEN_IDS else kind)
                batch = pa.record_batch(columns)
                if writer is None:
                    writer = stack.enter_context(pa.ipc.new_file(str(self._file(split, "arrow")), batch.schema))
                writer.write_batch(batch)
        assert writer is not None, "a split has a piece at least"

    def add_text(self, split: str, value: Any) -> None:
        """Write what is not numbers, as JSON, for `StoredSplits.text`."""
        write_json(self._file(split, "json"), value)

    def _file(self, split: str, ending: str) -> Path:
        if split not in self.splits:
            self.splits.append(split)
        return self._folder / f"{self.splits.index(split)}.{ending}"


class StoredSplits:
    """The splits of a data set that a SplitWriter has written, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        """`meta` is the content of meta.json. Raises UserError if it is damaged."""
        self._folder = folder
        with read_meta(folder) as self.meta:
            self._splits = self.meta["splits"]

    def items(self, split: str, schema: Schema[Item]) -> MappedItems[Item]:
        """Return the examples of a split. Raises UserError if they are damaged."""
        with read_meta(self._folder):
            return MappedItems(self._file(split, "arrow"), schema)

    def text(self, split: str) -> Any:
        """Read what `SplitWriter.add_text` has written."""
        return read_json(self._file(split, "json"))

    def _file(self, split: str, ending: str) -> Path:
        return self._folder / f"{self._splits.index(split)}.{ending}"


def in_pieces(
    elements: Iterable[Element], *, size: Callable[[Element], int] = lambda element: 0
) -> Iterator[list[Element]]:
    """Cut elements into `pieces` that are tokenized together; `size` is the number of characters of an element."""
    with Activity("Tokenizing", unit="examples") as activity:
        for piece in pieces(elements, AT_ONCE, size):
            yield piece
            activity.advance(len(piece))


def pieces(elements: Iterable[Element], count: int, size: Callable[[Element], int]) -> Iterator[list[Element]]:
    """Cut elements into lists of a number of them; a list also ends where its sizes reach _MOST_CHARACTERS."""
    piece, characters = list[Element](), 0
    for element in elements:
        piece.append(element)
        characters += size(element)
        if len(piece) == count or characters >= _MOST_CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece
