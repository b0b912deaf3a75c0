"""Text files of data: their lines and their content, and one sentence where a file cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from llmdistill.errors import UserError
from llmdistill.fingerprints import file_sha256


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
    """Return the sha256 of a file of data; a UserError if it cannot be read."""
    try:
        return file_sha256(path)
    except OSError as error:
        raise unreadable(path, "UTF-8 text", error) from error


def unreadable(path: Path, kind: str, error: Exception) -> UserError:
    """The error for a file that cannot be read as text or as a table."""
    if isinstance(error, UnicodeDecodeError) and path.is_file():
        return UserError(f"{path}{_line_of_bytes(path)}: cannot be read as {kind} ({error.reason}); save it as UTF-8")
    return UserError(f"{path}: cannot be read as {kind} ({first_line(error)}); give a readable file")


def _line_of_bytes(path: Path) -> str:
    """Return ":N" for the first line that is not UTF-8."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return f":{number}"
    return ""


def first_line(error: Exception) -> str:
    """Return the kind of an error of a library and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
