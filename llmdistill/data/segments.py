"""Reads the segments (lines) of a text, each with its document, one after the other and never all of them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import groupby
from math import ceil
from operator import itemgetter
from pathlib import Path

import numpy as np

from llmdistill.data.sources import stream_rows
from llmdistill.errors import UserError

Segments = Iterator[tuple[tuple[int, int], str]]
"""The lines of a text, each with its document: number of the file and number in the file."""

ROWS = (".jsonl", ".json", ".parquet", ".csv")
"""Endings of files that hold rows; any other file is plain text."""

_DOCUMENTS = 4  # separates these random numbers from those of windows, sequences and answers


def text_files(reference: str | Path) -> list[Path] | None:
    """The files of a text in order, or None if the text is not local.

    Raises:
        UserError: a folder has no files, or a path does not exist.
    """
    path = Path(reference)
    if path.is_dir():
        inside = sorted(path.rglob("*"))
        files = [each for each in inside if each.is_file() and not _is_hidden(each.relative_to(path))]
        if not files:
            raise UserError(f"{reference}: a folder without files; put the text in or name a file")
        return files
    if path.exists():
        return [path]
    if path.is_absolute() or path.suffix.lower() == ".txt":
        raise UserError(
            f"{reference}: no such file; give a plain text, JSONL, JSON, Parquet or CSV file, a folder of them, "
            "or OWNER/NAME[[:CONFIG]:SPLIT] of a data set on the hub"
        )
    return None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def file_kind(file: Path) -> str:
    """The ending of a file of rows, else "text"."""
    suffix = file.suffix.lower()
    return suffix if suffix in ROWS else "text"


def read_segments(reference: str | Path, files: list[Path] | None, *, field: str, keep_ends: bool) -> Segments:
    """Read the segments of a text.

    Args:
        reference: the name of the text on the hub, if it has no files.
        files: the files of the text, from `text_files`.
        field: the key of the text in rows.
        keep_ends: whether a segment keeps its line end and the blanks at its ends, as decoders need it.

    Raises:
        UserError: a row has no text, or a file is not UTF-8; raised when the reading reaches this place.
    """
    if files is None:
        yield from _rows(0, reference, field, keep_ends)
        return
    for number, file in enumerate(files):
        if file_kind(file) == "text":
            yield from _text(number, file, keep_ends)
        else:
            yield from _rows(number, file, field, keep_ends)


def draw_documents(segments: Segments, fraction: float, seed: int) -> Segments:
    """Keep the segments of one document out of each 1/fraction successive documents; the seed decides which.

    So of n documents, for any n, between ⌊n·fraction⌋ and ⌈n·fraction⌉ are kept, from all parts of the text, and their
    number need not be known before the last document is read.
    """
    # The fraction is used as it was written: 0.1 is one of every ten, while the float 0.1 is a little more.
    every = 1 / Fraction(str(fraction))
    rng = np.random.default_rng((seed, 0, _DOCUMENTS))
    taken = group = end = 0
    for number, (_, document) in enumerate(groupby(segments, key=itemgetter(0))):
        if number == end:
            group += 1
            end = ceil(group * every)
            taken = int(rng.integers(number, end))
        if number == taken:
            yield from document


def _text(file_number: int, file: Path, keep_ends: bool) -> Segments:
    document = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for line in lines:
                if not line.strip():
                    document += 1
                    continue
                yield (file_number, document), line if keep_ends else line.strip()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> UserError:
    """The error for a file that is not text."""
    return UserError(f"{file}: cannot be read as UTF-8 text ({type(error).__name__}: {error}); give a readable file")


def _rows(file_number: int, reference: str | Path, field: str, keep_ends: bool) -> Segments:
    for document, (row, source) in enumerate(stream_rows(reference)):
        text = row.get(field)
        if text is None:
            raise UserError(
                f'{source}: the key "{field}" is missing (there are {sorted(row)}); '
                "name the key of the text as data.text.field"
            )
        if not isinstance(text, str):
            raise UserError(
                f'{source}: "{field}" is a {type(text).__name__}, not a string (there are {sorted(row)}); quote it, '
                "or name the key of the text as data.text.field"
            )
        for line in _row_lines(text, keep_ends):
            yield (file_number, document), line


def _row_lines(text: str, keep_ends: bool) -> list[str]:
    # Only newlines end a line here; str.splitlines would also split at other separators.
    lines = text.split("\n")
    if not keep_ends:
        return [line.strip() for line in lines if line.strip()]
    segments: list[str] = []
    for place, line in enumerate(lines):
        ended = line + "\n" if place < len(lines) - 1 else line
        if line.strip():
            segments.append(ended)
        elif segments:
            segments[-1] += ended
    return segments
