"""A whole text as one string, for scores that must equal those of other tools, which tokenize it in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.data.sources import READERS, Data, open_rows, text_lines
from llmdistill.errors import UserError

PARAGRAPH = "\n\n"
"""What stands between the rows of a text; GPTQ's evaluation, which the SVD papers took over, joins WikiText-2 so."""


class TextSet(NamedTuple):
    """A text that models are scored on."""

    data: Data
    """A plain text file, texts or rows with a text in memory, a file of rows, or a name on the hub."""
    lines: bool = False
    """Whether each line of a plain text file is a row, as in the copy of WikiText on the hub: blank lines are empty
    rows, all others keep their line end."""

    def read(self) -> str:
        """Return a plain text file as it stands, and of anything else the rows' texts joined with PARAGRAPH.

        Raises:
            UserError: the text does not exist, is empty, or is not UTF-8, or a row has no text.
        """
        path = Path(self.data) if isinstance(self.data, str | Path) else None
        if path is not None and path.is_file() and path.suffix.lower() not in READERS:
            text = "".join(text_lines(path))
            if self.lines:
                text = PARAGRAPH.join(line if line.strip() else "" for line in text.splitlines(keepends=True))
        else:
            text = PARAGRAPH.join(_rows(self.data))
        if not text.strip():
            raise UserError(f"{path or 'data'}: holds no text; give at least one line of it")
        return text


def _rows(data: Data) -> list[str]:
    if isinstance(data, str | Path):
        if Path(data).suffix.lower() == ".txt":
            raise UserError(f"{data}: no such file; give a plain text, or NAME of a data set on the hub")
        rows: Iterable[tuple[str | Mapping[str, Any], str]] = open_rows(data, streaming=True)
    else:
        given: Iterable[Any] = data
        rows = ((row, f"row {number}") for number, row in enumerate(given, start=1))
    texts = []
    for row, source in rows:
        text = row if isinstance(row, str) else row.get("text")
        if not isinstance(text, str):
            raise UserError(f'{source}: the key "text" is missing or no string (there are {sorted(row)})')
        texts.append(text)
    return texts
