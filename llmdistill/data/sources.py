"""Reads data sets: JSONL, JSON, Parquet, CSV and TSV files, data sets on the hub, and rows or texts in memory."""

from __future__ import annotations

import csv
import glob
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from llmdistill.data.examples import Example, parse_row
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import has_half_surrogate, parse_json, write_text
from llmdistill.fingerprints import digest, file_sha256
from llmdistill.progress import progress

Rows = Iterator[tuple[dict[str, Any], str]]
"""Each row with its place: ``file:line``, ``file: item N`` or ``file: row N``, from 1."""

Data = str | Path | Iterable[Mapping[str, Any]] | Iterable[str]
"""A path, a name (`embedded:train`, or one on the hub), rows of the forms of `parse_row` (a list, a
datasets.Dataset, any iterable that can be iterated more than once), or texts."""

DataKind = Literal["instructions", "text"]

_FORMS = ("instruction", "messages", "conversations", "prompt")

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILE = re.compile(r"hf:/+datasets/(?P<file>[^:]+)(:(?P<split>.+))?")  # pathlib squeezes the two slashes to one
_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_SLICE = re.compile(r"(?P<split>[^\[\]+]+)\[(?P<start>\d*):(?P<stop>\d*)\]")


def text_lines(path: Path, *, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text file, with their ends; a UserError if it cannot be read, or is not UTF-8.

    Only newlines end a line; str.splitlines would also split at separators inside strings. `newline` is that of `open`.
    """
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, "UTF-8 text", error) from error


def content_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise unreadable(path, "UTF-8 text", error) from error


def unreadable(path: Path, kind: str, error: Exception) -> UserError:
    """The error for a file that cannot be read as text or as a table; it names the first line that is not UTF-8."""
    if not isinstance(error, UnicodeDecodeError) or not path.is_file():
        return UserError(f"{path}: cannot be read as {kind} ({first_line(error)}); give a readable file")
    where = ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                where = f":{number}"
                break
    return UserError(f"{path}{where}: cannot be read as {kind} ({error.reason}); save it as UTF-8")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def read_examples(reference: str | Path, *, needs_answer: bool = True) -> list[Example]:
    """Read the examples of a file or of a data set on the hub; `parse_row` describes their forms.

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
    rows = progress(open_rows(reference), f"Reading {shown(reference)}", "rows")
    examples = [parse_row(row, source, needs_answer=needs_answer) for row, source in rows]
    if not examples:
        raise no_example(reference)
    return examples


def check_first_row(reference: str | Path) -> None:
    """Check that a local data set exists, and the first row of a file whose rows are lines; nothing else is read."""
    rows = open_rows(reference, streaming=True)
    if Path(reference).is_file() and Path(reference).suffix.lower() in (".jsonl", ".tsv"):
        first = next(rows, None)
        if first is None:
            raise no_example(reference)
        parse_row(*first)


def shown(reference: str | Path) -> str:
    """Return a reference as it is typed: a path has one slash after `hf:`."""
    return re.sub("^hf:/+", "hf://", str(reference))


def no_example(reference: str | Path) -> UserError:
    return UserError(f"{shown(reference)}: holds no example; give at least one row of instruction, input, output")


def open_rows(reference: str | Path, *, streaming: bool = False) -> Rows:
    """Read the rows of a file or of a data set on the hub, see `read_examples`, one after the other.

    Of a file they are never all in memory, but for a JSON array; of the hub they are not if `streaming`, which of the
    slices of the datasets library takes only those with whole numbers.

    Raises:
        UserError: immediately if the data set does not exist; for a malformed row, when the reading reaches it.
    """
    path = Path(reference)
    if os.path.exists(path):  # Path.exists raises an error for a name that is too long
        return READERS.get(path.suffix.lower(), _jsonl_rows)(path)
    in_set = _HUB_FILE.fullmatch(str(reference))
    kind = None if in_set is None else _KINDS.get(Path(in_set["file"]).suffix.lower())
    if in_set is not None and kind is not None:
        url = f"hf://datasets/{in_set['file']}"
        return _hub_rows(shown(reference), kind, None, in_set["split"] or "train", streaming, data_files=url)
    # A colon inside the brackets of a slice is not a separator.
    name, *rest = re.split(r":(?![^\[]*\])", str(reference))
    if path.suffix.lower() in READERS or not _HUB_NAME.fullmatch(name) or len(rest) > 2 or "" in rest:
        raise UserError(
            f"{reference}: no such file; give a JSONL, JSON, Parquet, CSV or TSV file, "
            "or OWNER/NAME[[:CONFIG]:SPLIT] of a data set on the hub"
        )
    config = rest[0] if len(rest) == 2 else None
    return _hub_rows(str(reference), name, config, rest[-1] if rest else "train", streaming)


def hub_name(reference: str | Path) -> str | None:
    """Return OWNER/NAME of the data set on the hub that a reference of `read_examples` means; None for any other."""
    if os.path.exists(reference):
        return None
    in_set = _HUB_FILE.fullmatch(str(reference))
    name = str(reference).partition(":")[0] if in_set is None else "/".join(in_set["file"].split("/")[:2])
    is_name = _HUB_NAME.fullmatch(name) is not None and Path(name).suffix.lower() not in READERS
    return name if is_name else None


def _jsonl_rows(path: Path) -> Rows:
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            where = f"{error.msg} at column {error.colno}"
            raise UserError(f"{source}: not JSON ({where}); write one object a line") from error
        if not isinstance(row, dict):
            raise UserError(f"{source}: a {type(row).__name__}, not an object; write one object a line")
        yield row, source


def _json_rows(path: Path) -> Rows:
    try:
        value = parse_json("".join(text_lines(path)))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # the file is JSONL with the ending .json
            yield from _jsonl_rows(path)
            return
        where = f"{path}:{error.lineno}"
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one array") from error
    items = value.get("data") if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise UserError(f'{path}: holds no array; give an array of objects, or an object with one under "data"')
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise UserError(f"{path}: item {number}: a {type(item).__name__}, not an object; make it one")
        yield item, f"{path}: item {number}"


def _csv_options(path: Path) -> dict[str, Any]:
    """Options that keep every value as text, "007", "NA" and "None" too. An empty value counts as missing."""
    from datasets import Features, Value

    with path.open(encoding="utf-8-sig", newline="") as file:
        header = next(csv.reader(file), [])
    return {"features": Features({name: Value("string") for name in header}), "keep_default_na": False, "na_values": ""}


def tsv_rows(path: Path, *, header: Sequence[str] | None = None) -> Rows:
    """Yield the rows of a table with tabs between its cells and no quoting; each place is file:line.

    The first line is the header unless one is given.
    """
    lines = text_lines(path, newline="\n")
    first = 1 if header else 2
    header = header or next(lines, "").rstrip("\r\n").split("\t")
    for number, line in enumerate(lines, start=first):
        if line.strip():
            cells = line.rstrip("\r\n").split("\t")
            yield dict(zip(header, cells, strict=False)), f"{path}:{number}"


def _table_rows(kind: str, path: Path) -> Rows:
    """Read the rows of a table piece by piece, so that the datasets library makes no second copy of it in its cache."""

    def open_table() -> Iterable[dict[str, Any]]:
        files, options = glob.escape(str(path)), _csv_options(path) if kind == "CSV" else {}
        return _load(kind.lower(), data_files=files, split="train", streaming=True, **options)

    return _numbered(str(path), open_table, lambda error: unreadable(path, kind, error))


def _hub_rows(reference: str, name: str, config: str | None, split: str, streaming: bool, **more: str) -> Rows:
    def open_set() -> Iterable[dict[str, Any]]:
        if not streaming or "[" not in split:
            return _load(name, config, split=split, streaming=streaming, **more)
        part = _SLICE.fullmatch(split)
        if part is None:
            raise UserError(
                f"{reference}: a set that is streamed is cut by whole numbers alone, such as train[:500]; "
                "cut it so or set data.streaming=false"
            )
        start = int(part["start"] or 0)
        rows = _load(name, config, split=part["split"], streaming=True, **more).skip(start)
        return rows.take(max(int(part["stop"]) - start, 0)) if part["stop"] else rows

    def not_loaded(error: Exception) -> UserError:
        return UserError(
            f"{reference}: no such file, and not loaded from the hub as data set {more.get('data_files', name)}, "
            f"{'' if config is None else f'configuration {config}, '}split {split} ({first_line(error)}); "
            "check the name, the split and the network, or give a file"
        )

    return _numbered(reference, open_set, not_loaded)


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

    return _numbered(place, lambda: list(_load(name, config, split=split)), not_loaded)


def _load(*source: Any, **options: Any) -> Any:
    import datasets

    return datasets.load_dataset(*source, **options)


def _numbered(
    reference: str, open_set: Callable[[], Iterable[dict[str, Any]]], explain: Callable[[Exception], UserError]
) -> Rows:
    try:
        for number, row in enumerate(open_set(), start=1):
            yield row, f"{reference}: row {number}"
    except UserError:
        raise
    except Exception as error:  # the datasets library passes on the exceptions of its readers and of the network
        raise explain(error) from error


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": partial(_table_rows, "Parquet"),
    ".csv": partial(_table_rows, "CSV"),
    ".tsv": tsv_rows,
}
"""The readers by the ending of a file."""


def kind_of(data: Data, *, field: str = "text") -> DataKind:
    """The kind of the data, by its first row, or by the ending of a file: a .txt is text, any other file instructions.

    Raises UserError if there is no row.
    """
    if isinstance(data, str | Path):
        return "text" if Path(data).suffix.lower() == ".txt" else "instructions"
    first = next(iter(data), None)
    if first is None:
        raise UserError("data holds no example; give at least one row of instruction, input, output")
    if isinstance(first, str):
        return "text"
    return "text" if field in first and not any(form in first for form in _FORMS) else "instructions"


def examples_of(data: Data, *, name: str = "data") -> list[Example]:
    """The examples of a file or of rows in memory; error messages name the rows `name`: row 1, 2 ...

    Raises UserError if the file does not exist, there is no row, or a row is malformed.
    """
    if isinstance(data, str | Path):
        return read_examples(locate(str(data)))
    examples = []
    for number, row in enumerate(data, start=1):
        where = f"{name}: row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: a {type(row).__name__}, not a dict; give rows with instruction and output")
        _check_text(row, where)
        examples.append(parse_row(row, where))
    if not examples:
        raise UserError(f"{name} holds no example; give at least one row of instruction, input, output")
    return examples


def _check_text(row: Mapping[str, Any] | str, where: str) -> None:
    if has_half_surrogate(row if isinstance(row, str) else dict(row)):
        raise UserError(f"{where}: it holds half of a surrogate pair, which is no character; fix the text")


def write_rows(data: Iterable[Mapping[str, Any]] | Iterable[str], folder: Path, *, field: str = "text") -> Path:
    """Write rows as JSONL into a folder, under a name that depends on their content; texts become rows of `field`.

    Raises UserError if a row is no text, or if the file is there and its content is no longer that of its name.
    """
    rows: list[dict[str, Any]] = []
    row: Any
    for number, row in enumerate(data, start=1):
        _check_text(row, f"data: row {number}")
        rows.append({field: row} if isinstance(row, str) else dict(row))
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path = folder / f"data-{digest(text)[:16]}.jsonl"
    if not path.is_file():
        write_text(path, text)
    elif path.read_bytes() != text.encode():
        raise UserError(f"{path} changed after it was written; remove it, and the same call writes it again")
    return path
