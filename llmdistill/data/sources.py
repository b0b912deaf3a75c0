"""Reads data sets: files, folders of them, several of them, data sets on the hub, and data in memory."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from llmdistill.data.examples import Example
from llmdistill.data.memory import rows_in_memory, without_format
from llmdistill.data.readers import (
    READERS,
    Rows,
    by_lower_case,
    first_line,
    read_error,
    read_jsonl,
    with_names,
    without_nulls,
)
from llmdistill.data.references import local_files, parts_of
from llmdistill.data.rows import FORMAT_KEYS, describe_left_out, parse_rows
from llmdistill.embedded import locate_data
from llmdistill.errors import UserError
from llmdistill.files import LFS_REMEDY, has_half_surrogate, is_lfs_pointer, write_text
from llmdistill.fingerprints import digest
from llmdistill.messages import say
from llmdistill.progress import progress

Data = str | Path | Iterable[Any] | Mapping[str, Any]
"""A path, a name (`embedded:train`, or one on the hub), or data in memory, as in `rows_in_memory`."""

DataKind = Literal["instructions", "text"]

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILE = re.compile(r"hf:/+datasets/(?P<file>[^:]+)(:(?P<split>.+))?")  # pathlib squeezes the two slashes to one
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
"""What the datasets library calls its readers of these files."""
_SLICE = re.compile(r"(?P<split>[^\[\]+]+)\[(?P<start>\d*):(?P<stop>\d*)\]")

_CHECKED_BYTES = 32_000_000
"""A local set up to this size is checked as a whole before a run starts; of a larger one the first rows."""
_CHECKED_ROWS = 5_000
_HOW = (
    "give a JSONL, JSON, Parquet, CSV or TSV file, or OWNER/NAME[[:CONFIG]:SPLIT] of a data set on the hub; or a "
    "folder of such files, or several of these with commas between them"
)


def read_examples(reference: str | Path, *, needs_answer: bool = True) -> list[Example]:
    """Read the examples of a file or of a data set on the hub; `parse_row` describes their formats.

    Args:
        reference: a JSONL, JSON, Parquet, CSV or TSV file (any other file is read as JSONL), or else a name on the hub:
            ``OWNER/NAME``, ``OWNER/NAME:SPLIT`` or ``OWNER/NAME:CONFIG:SPLIT``, with the split in the notation of the
            datasets library, such as ``train[:500]``, and ``train`` by default; or one file of such a data set,
            ``hf://datasets/OWNER/NAME/FILE``, optionally with ``:train[:500]``. A path that exists takes precedence
            over a name.
        needs_answer: False if answers may be missing, for prompts that a model has to answer.

    Raises:
        UserError: the data set does not exist or is empty, or a row is malformed; the message names the row.
    """
    rows = progress(open_rows(reference), f"Reading {as_typed(reference)}", "rows")
    left_out = Counter[str]()
    examples = list(parse_rows(rows, left_out, needs_answer=needs_answer))
    if not examples:
        raise no_example(reference, left_out)
    print_left_out(as_typed(reference), examples, left_out)
    return examples


def print_left_out(name: str, examples: Sequence[Example], left_out: Counter[str]) -> None:
    if left_out:
        say(f"{name}: {len(examples):,} examples.{describe_left_out(left_out)}", aside=True)


def check_rows(reference: str | Path, *, thorough: bool = True) -> None:
    """Check that a local data set exists, and parse its rows: all up to _CHECKED_BYTES, else the first thousands.

    Unless `thorough`, parse only the first row. Read nothing of a set on the hub.
    """
    rows = open_rows(reference, streaming=True)
    files = [file for part in parts_of(reference) for file in local_files(part.reference) or ()]
    if not files:
        return
    is_small = thorough and sum(file.stat().st_size for file in files) <= _CHECKED_BYTES
    if not is_small and any(file.suffix.lower() == ".json" for file in files):
        return  # which would be read as a whole
    has_example, left_out = False, Counter[str]()
    for _ in parse_rows(rows if is_small else islice(rows, _CHECKED_ROWS if thorough else 1), left_out):
        has_example = True
    if not has_example and is_small:
        raise no_example(reference, left_out)


def as_typed(reference: str | Path) -> str:
    """Return a reference as it is typed: a path has one slash after `hf:`."""
    return re.sub("^hf:/+", "hf://", str(reference))


def no_example(reference: str | Path, left_out: Counter[str] | None = None) -> UserError:
    without = describe_left_out(left_out or {}).rstrip(".").lower()
    return UserError(
        f"{as_typed(reference)}: holds no example{f' to learn;{without}' if without else ''}; give at least one row of "
        "instruction, input, output"
    )


def open_rows(reference: str | Path, *, streaming: bool = False) -> Rows:
    """Read the rows of a file, of the files of a folder, of a data set on the hub, or of several of these, one after
    the other; see `read_examples`.

    The rows of a file are never all in memory, except those of a JSON array; the rows of the hub are not if
    `streaming`, which supports only the slices of the datasets library with whole numbers.

    Raises:
        UserError: immediately if a data set does not exist, or has a weight; for a malformed row, when the reading
            reaches it.
    """
    parts = parts_of(reference)
    if any(part.weight is not None for part in parts):
        raise UserError(f"{reference}: weights are for data.train, and not with data.streaming; leave them out")
    return chain.from_iterable([_open_set(part.reference, streaming) for part in parts])


def _open_set(reference: str, streaming: bool) -> Rows:
    files, path = local_files(reference), locate_data(reference)
    if files is not None:
        if (pointer := next(filter(is_lfs_pointer, files), None)) is not None:
            raise UserError(f"{pointer}: {LFS_REMEDY}")
        return chain.from_iterable(READERS.get(file.suffix.lower(), read_jsonl)(file) for file in files)
    if os.path.isdir(path):
        # Its import is slow, and files do not need it.
        import datasets

        return _number_rows(
            reference,
            lambda: without_format(datasets.load_from_disk(str(path))),
            lambda error: read_error(path, "a saved data set", error),
        )
    hub_file = _HUB_FILE.fullmatch(reference)
    builder = None if hub_file is None else _BUILDERS.get(Path(hub_file["file"]).suffix.lower())
    if hub_file is not None and builder is not None:
        url = f"hf://datasets/{hub_file['file']}"
        return _read_hub(as_typed(reference), builder, None, hub_file["split"] or "train", streaming, data_files=url)
    # A colon inside the brackets of a slice is not a separator.
    name, *rest = re.split(r":(?![^\[]*\])", reference)
    # DATA/FILE.jsonl would also be a name on the hub, but it is a file with a typing mistake.
    if path.suffix.lower() in READERS or not _HUB_NAME.fullmatch(name) or len(rest) > 2 or "" in rest:
        raise UserError(f"{reference}: no such file; {_HOW}")
    config = rest[0] if len(rest) == 2 else None
    return _read_hub(reference, name, config, rest[-1] if rest else "train", streaming)


def hub_name(reference: str | Path) -> str | None:
    """Return OWNER/NAME of the data set on the hub that a reference of `read_examples` means; None for any other."""
    parts = parts_of(reference)
    if os.path.exists(reference) or len(parts) > 1:
        return None
    hub_file = _HUB_FILE.fullmatch(str(reference))
    name = str(reference).partition(":")[0] if hub_file is None else "/".join(hub_file["file"].split("/")[:2])
    is_name = _HUB_NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in READERS
    return name if is_name else None


def _read_hub(reference: str, name: str, config: str | None, split: str, streaming: bool, **more: str) -> Rows:
    def open_set() -> Iterable[dict[str, Any]]:
        if not streaming or "[" not in split:
            return _load(name, config, split=split, streaming=streaming, **more)
        part = _SLICE.fullmatch(split)
        if part is None:
            raise UserError(
                f"{reference}: a set that is streamed is cut by whole numbers alone, such as train[:500]; "
                "cut it so or set data.streaming=false"
            )
        # The datasets library slices no split that is streamed.
        start = int(part["start"] or 0)
        rows = _load(name, config, split=part["split"], streaming=True, **more).skip(start)
        # `take` refuses a negative number, as of train[5:2].
        return rows.take(max(int(part["stop"]) - start, 0)) if part["stop"] else rows

    def not_loaded(error: Exception) -> UserError:
        return UserError(
            f"{reference}: no such file, and not loaded from the hub as data set {more.get('data_files', name)}, "
            f"{'' if config is None else f'configuration {config}, '}split {split} ({first_line(error)}); "
            "check the name, the split and the network, or give a file"
        )

    return _number_rows(reference, open_set, not_loaded)


def benchmark_rows(name: str, config: str | None, split: str, *, files: str) -> Rows:
    """Read a split of a benchmark from the hub, whole, with places such as ``nyu-mll/glue, rte, validation: row 1``.

    Raises:
        UserError: it cannot be loaded; the message ends with the `files` that would do instead.
    """
    place = ", ".join(part for part in (name, config, split) if part is not None)

    def not_loaded(error: Exception) -> UserError:
        return UserError(
            f"{place}: not loaded from the hub ({first_line(error)}); check the network, or give {files} as the data "
            "folder"
        )

    return _number_rows(place, lambda: list(_load(name, config, split=split)), not_loaded)


def _load(*source: Any, **options: Any) -> Any:
    import datasets

    return datasets.load_dataset(*source, **options)


def _number_rows(
    reference: str, open_set: Callable[[], Iterable[dict[str, Any]]], explain: Callable[[Exception], UserError]
) -> Rows:
    try:
        for number, row in enumerate(open_set(), start=1):
            yield without_nulls(row), f"{reference}: row {number}"
    except UserError:
        raise
    except Exception as error:  # the datasets library passes on the exceptions of its readers and of the network
        raise explain(error) from error


def kind_of(data: Data, *, field: str = "text", name: str = "data") -> DataKind:
    """Return the kind of the data by its first row; .txt files are text, and what is not on this machine instructions.

    Raises UserError if data in memory have no row, or as in `rows_in_memory`.
    """
    if isinstance(data, str | Path):
        references = [part.reference for part in parts_of(data)]
        if all(Path(reference).suffix.lower() == ".txt" for reference in references):
            return "text"
        first: Any = None  # of a set that is not local, or is malformed, which is told where its rows are read
        with suppress(UserError):
            files = local_files(references[0]) or []
            # A large array of JSON would be read as a whole.
            is_whole = any(file.suffix.lower() == ".json" and file.stat().st_size > _CHECKED_BYTES for file in files)
            if files and not is_whole:
                first, _ = next(iter(open_rows(references[0], streaming=True)), (None, ""))
    else:
        first = next(rows_in_memory(data, name), None)
        if first is None:
            raise UserError(f"{name} holds no example; give at least one row of instruction, input, output")
    if isinstance(first, str):
        return "text"
    if not isinstance(first, Mapping):
        return "instructions"
    keys = with_names(first, by_lower_case((*FORMAT_KEYS, field)), name).keys()
    is_instruction = not keys.isdisjoint(set(FORMAT_KEYS).difference(_ABOUT_A_TEXT))
    return "text" if field in keys and not is_instruction else "instructions"


_ABOUT_A_TEXT = ("query", "question", "problem")
"""Keys of a format that may also stand beside a text, in a corpus."""


def examples_of(data: Data, *, name: str = "data") -> list[Example]:
    """Return the examples of a file or of rows in memory; error messages name the rows `name`: row 1, 2 ...

    Raises UserError if the file does not exist, there is no row, or a row is malformed.
    """
    if isinstance(data, str | Path):
        return read_examples(data)
    left_out = Counter[str]()
    rows = _checked_rows(data, name, Mapping, "not a dict; give rows with instruction and output")
    examples = list(parse_rows(rows, left_out))
    if not examples:
        raise UserError(f"{name} holds no example; give at least one row of instruction, input, output")
    print_left_out(name, examples, left_out)
    return examples


def _checked_rows(data: object, name: str, kinds: Any, remedy: str) -> Iterator[tuple[Any, str]]:
    """Yield the rows of data in memory with their places; UserError for one that is none of these kinds, or no text."""
    for number, row in enumerate(rows_in_memory(data, name), start=1):
        where = f"{name}: row {number}"
        if not isinstance(row, kinds):
            raise UserError(f"{where}: a {type(row).__name__}, {remedy}")
        if has_half_surrogate(row if isinstance(row, str) else dict(row)):
            raise UserError(f"{where}: it holds half of a surrogate pair, which is no character; fix the text")
        yield row, where


def write_rows(data: Data, folder: Path, *, field: str = "text", name: str = "data") -> Path:
    """Write rows as JSONL into a folder, under a name that depends on their content; texts become rows of `field`.

    Raises UserError if a row is no text, or if the file is there and its content is no longer that of its name.
    """
    rows: list[dict[str, Any]] = []
    for row, _ in _checked_rows(data, name, (str, Mapping), "neither a dict nor a text; give rows as one of them"):
        rows.append({field: row} if isinstance(row, str) else dict(row))
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path = folder / f"data-{digest(text)[:16]}.jsonl"
    if not path.is_file():
        write_text(path, text)
    elif path.read_bytes() != text.encode():
        raise UserError(f"{path} changed after it was written; remove it, and the same call writes it again")
    return path
