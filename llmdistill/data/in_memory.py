"""Data in memory: rows or texts that the caller passes instead of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from llmdistill.data.examples import Example, parse_row
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.fingerprints import digest

Data = str | Path | Iterable[Mapping[str, Any]] | Iterable[str]
"""A path, a name (`embedded:train`, or one on the hub), rows of the forms of `parse_row` (a list, a
datasets.Dataset, any iterable that can be iterated more than once), or texts."""

DataKind = Literal["instructions", "text"]

_FORMS = ("instruction", "messages", "conversations", "prompt")


def kind_of(data: Data, *, field: str = "text") -> DataKind:
    """The kind of the data, by its first row, or by the ending of a file: a .txt is text, any other file instructions.

    Args:
        data: as the caller gave it.
        field: the key of the text in rows.

    Raises:
        UserError: there is no row.
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
    """The examples of a file or of rows in memory.

    Args:
        data: as the caller gave it.
        name: the name of the data in error messages; rows are counted from 1.

    Raises:
        UserError: the file does not exist, there is no row, or a row is malformed.
    """
    if isinstance(data, str | Path):
        return read_examples(locate(str(data)))
    examples = [parse_row(_row(row, f"{name}: row {i}"), f"{name}: row {i}") for i, row in enumerate(data, start=1)]
    if not examples:
        raise UserError(f"{name} holds no example; give at least one row of instruction, input, output")
    return examples


def write_rows(data: Iterable[Mapping[str, Any]] | Iterable[str], folder: Path, *, field: str = "text") -> Path:
    """Write rows as JSONL into a folder, under a name that depends on their content; texts become rows of `field`.

    So the same data always has the same name, and an interrupted run finds its data again.
    """
    rows = ({field: row} if isinstance(row, str) else dict(row) for row in data)
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path = folder / f"data-{digest(text)[:16]}.jsonl"
    if not path.is_file():
        write_text(path, text)
    return path


def _row(row: object, where: str) -> Mapping[str, Any]:
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a {type(row).__name__}, not a dict; give rows with instruction and output")
    return row
