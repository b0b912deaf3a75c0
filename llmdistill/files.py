"""Atomic writes of files and folders: if the process is killed, either the old or the new version exists."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError

_PART = ".part"
"""How the name of a file ends that is not written to its end."""


def file_name(text: str) -> str:
    """Return a text, such as a model's folder or its name on the hub, as the name of a file or a folder."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def write_text(path: Path, text: str) -> None:
    """Write a text file; create its folder if necessary. Raises UserError if it cannot be written."""
    part = path.with_name(f"{path.name}{_PART}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: Exception) -> UserError:
    """Return the UserError for an error of the disk or of permissions while a file or folder was written."""
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return UserError(f"{path}: it cannot be written, the disk is full: make room there and start the command again")
    reason = getattr(error, "strerror", None) or error
    return UserError(f"{path}: it cannot be written ({reason}): choose another folder, or make this one writable")


def is_unused(folder: Path, *others: str) -> bool:
    """Whether a folder holds nothing but what the kill of a write may have left, and entries of these names."""
    return all(entry.name in others or entry.name.endswith(_PART) for entry in folder.iterdir())


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


def read_json(path: Path) -> Any:
    """Read a JSON value of a model's folder. Raises UserError, which names the line, if the file is not valid JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg}): mend or replace it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: mend or replace it") from error


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` if the block ends without an exception.

    Temporary folders of `path` that killed processes have left are removed first.

    Raises UserError if `path` exists and is not an empty folder, or if it cannot be written.
    """
    final = Path(path)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise UserError(f"{final} exists and is not empty; give another folder or remove it")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final)
        partial, lock = _locked_folder(final)
        try:
            yield partial
            partial.chmod(0o755)
            partial.replace(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
    except Exception as error:
        # safetensors raises an exception of its own for a full disk.
        is_of_disk = isinstance(error, OSError) or os.strerror(errno.ENOSPC) in str(error)
        if is_of_disk and not isinstance(error, UserError):
            raise cannot_write(final, error) from error
        raise


def _locked_folder(final: Path) -> tuple[Path, int]:
    """Create a temporary folder and lock it until the returned descriptor is closed, by a kill if need be."""
    while True:
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        descriptor = os.open(partial, os.O_RDONLY)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if partial.is_dir():  # another process may have taken it for abandoned before it was locked
            return partial, descriptor
        os.close(descriptor)


def _remove_abandoned(final: Path) -> None:
    """Remove the temporary folders of `final` that no process has locked."""
    name = re.compile(re.escape(f".{final.name}.") + r"[a-z0-9_]{8}")  # as tempfile.mkdtemp makes them
    for folder in final.parent.iterdir():
        if name.fullmatch(folder.name) is None:
            continue
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(descriptor)
