"""A whole text as one string, for scores that must equal those of other tools, which tokenize it in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.data.memory import rows_in_memory
from llmdistill.data.readers import READERS, text_lines, with_names
from llmdistill.data.references import text_files
from llmdistill.data.sources import Data, open_rows
from llmdistill.errors import UserError

PARAGRAPH = "\n\n"
"""The separator between the rows of a text: GPTQ's evaluation, which the SVD papers took over, joins WikiText-2 so."""


class WholeText(NamedTuple):
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
        files = text_files(self.data) if isinstance(self.data, str | Path) else None
        plain = files is not None and all(file.suffix.lower() not in READERS for file in files)
        if files is not None and plain:
            text = PARAGRAPH.join("".join(text_lines(file)) for file in files)
            if self.lines:
                text = PARAGRAPH.join(line if line.strip() else "" for line in text.splitlines(keepends=True))
        else:
            if isinstance(self.data, str | Path):
                rows: Iterable[tuple[Any, str]] = open_rows(self.data, streaming=True)
            else:
                rows = ((row, f"row {number}") for number, row in enumerate(rows_in_memory(self.data), start=1))
            texts = []
            for row, source in rows:
                row_text = with_names(row, {"text": "text"}, source).get("text") if isinstance(row, Mapping) else row
                if not isinstance(row_text, str):
                    keys_or_type = sorted(row) if isinstance(row, Mapping) else type(row).__name__
                    raise UserError(f'{source}: the key "text" is missing or no string (there are {keys_or_type})')
                texts.append(row_text)
            text = PARAGRAPH.join(texts)
        if not text.strip():
            name = self.data if isinstance(self.data, str | Path) else "data"
            raise UserError(f"{name}: holds no text; give at least one line of it")
        return text
