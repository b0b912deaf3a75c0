"""Atomic writes of files and folders: if the process is killed, either the old or the new version exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError


def file_name(text: str) -> str:
    """Return a text, such as a model's folder or its name on the hub, as the name of a file or a folder."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def write_text(path: Path, text: str) -> None:
    """Write a text file; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sync(path: Path) -> None:
    """Wait until a file and its name in the folder are on the disk, so that a power failure cannot lose them."""
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_TOO_DEEP = re.compile(r"(?:[\[{][^\[\]{}]{0,99}){400}")
_TOO_LONG = re.compile(r"\d{4300}")  # Python reads no longer whole number, because the time grows with its square


def parse_json(text: str) -> Any:
    """Read a JSON value of somebody else's.

    Raises:
        json.JSONDecodeError: it is not valid JSON, or one of the values that Python reads by other exceptions or passes
            on to the libraries that fail with them: too many levels, too long a number, half of a surrogate pair.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, _place(_TOO_DEEP, text)) from error
    except ValueError as error:
        raise json.JSONDecodeError("a number with too many digits", text, _place(_TOO_LONG, text)) from error
    half = has_half_surrogate(value) if "\\ud" in text or "\\uD" in text else False
    if half:
        place = max(text.find("\\ud"), text.find("\\uD"))
        raise json.JSONDecodeError("a \\ud... escape without its other half, which is no character", text, place)
    return value


def _place(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return 0 if found is None else found.start()


def has_half_surrogate(value: Any) -> bool:
    """Whether a text in a plain JSON value has half of a surrogate pair, which no file and no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def read_json(path: Path, *, shown: str | None = None) -> Any:
    """Read a JSON value of a model's folder or of a configuration. A UserError names the line that is not valid JSON.

    `shown` is the path as the user gave it.
    """
    name = shown or str(path)
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{name}:{error.lineno}: not valid JSON ({error.msg}): mend or replace it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text: mend or replace it") from error


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` if the block ends without an exception.

    Raises UserError if `path` exists and is not an empty folder.
    """
    final = Path(path)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{final} exists and is not empty; give another folder or remove it")
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.replace(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
