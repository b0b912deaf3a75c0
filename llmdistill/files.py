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
from pathlib import Path, PureWindowsPath
from typing import IO, Any

from llmdistill.errors import UserError

_PART = ".part"
"""The ending of a file or folder that is being written."""


def cache_folder(setting: str | Path | None = None) -> Path:
    """Return the folder of what later commands use again: by default $LLMDISTILL_CACHE, or ~/.cache/llmdistill."""
    return Path(setting or os.environ.get("LLMDISTILL_CACHE") or "~/.cache/llmdistill").expanduser()


def file_name(text: str) -> str:
    """Return a text, such as a model's folder or its name on the hub, as the name of a file or a folder."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")


def file_state(file: Path) -> tuple[int, int]:
    """Return what changes with the content of a file, without reading it: its size, and the time of its last change."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file only names the file that Git LFS would have downloaded."""
    begin = b"version https://git-lfs"
    with suppress(OSError), file.open("rb") as content:
        return content.read(len(begin)) == begin
    return False


LFS_REMEDY = "it is a pointer of Git LFS, not the file itself: run git lfs pull in its folder, or download it again"


def nearest_folder(folder: Path) -> Path:
    """Return the folder itself, or the nearest folder above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))


def is_outside(folder: Path, name: str) -> bool:
    """Return whether a file that is named in a folder of somebody else's lies outside of it, by the name or by a link.

    The name is read as Windows reads it too. Links into the blobs of the hub's cache, of which its folders of
    models are made, do not count.
    """
    if not name.isprintable() or "\\" in name or PureWindowsPath(name).anchor or ".." in name.split("/"):
        return True
    target = Path(os.path.realpath(folder / name))
    of_hub = target.parent.name == "blobs" and target.parents[1].name.startswith("models--")
    return not of_hub and not target.is_relative_to(os.path.realpath(folder))


def check_writable(path: Path, key: str) -> None:
    """Raise a UserError if a folder cannot be made or written: a file is in its way, or the system takes none there.

    `key` is the setting of the folder. A folder is made in the nearest one that exists, and removed.
    """
    folder = path.absolute()
    long = next((part for part in folder.parts if len(os.fsencode(part)) > 255), None)  # NAME_MAX of Linux
    if long is not None:
        raise UserError(f"{key} has the name {long[:40]!r}... of {len(os.fsencode(long))} bytes: give 255 at most")
    there = nearest_folder(folder)
    if not os.path.isdir(there):
        raise UserError(f"{key} {path}: {there} is a file; give another folder, or move the file away")
    try:
        # Permissions do not tell: root may write to /proc, where no folder can be made.
        os.rmdir(tempfile.mkdtemp(prefix=".try.", suffix=_PART, dir=there))
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise UserError(
            f"{key} {path}: no folder can be made in {there} ({reason}); give another folder, or fix its permissions"
        ) from error


def json_lines(path: Path) -> list[Any]:
    """Read the values of a JSONL file that this program wrote; only newlines end a line, which texts cannot hold."""
    with path.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


_DISK = (errno.ENOSPC, errno.EDQUOT)
# What the user can mend by another path, room or permissions; any other error is not explained.
_OF_PLACE = (
    *_DISK,
    errno.EFBIG,  # of a limit (ulimit -f), or of a file system such as FAT
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.EIO,
)


def explain_refusal(error: BaseException, path: Path | None = None, size: int | None = None) -> UserError | None:
    """Return the sentence for a file or folder that the operating system refuses; None for any other exception.

    A full disk is named with its free bytes, also where a library has put the system's error into words of its own.
    `path` is what was read or written, by default what the error names; `size` is how many bytes it needs.
    """
    number = getattr(error, "errno", None)
    place = getattr(error, "filename", None) if path is None else path
    if not isinstance(error, OSError):
        # Libraries put the system's error into words: safetensors writes `(os error 28)`, others only its text.
        number, text = None, str(error)
        match = re.search(r"\(os error (\d+)\)", text)
        if match is not None:
            number = int(match[1])
        elif os.strerror(errno.ENOSPC) in text:
            number = errno.ENOSPC
    if number not in _OF_PLACE:
        return None
    reason = os.strerror(number).lower()
    shown = "a file" if place is None else os.fsdecode(place)
    kept = "what is finished stays, and the same command goes on from there"
    if number == errno.EFBIG:
        return UserError(f"{shown}: {reason}: raise the limit (ulimit -f), or give a folder on another disk; {kept}")
    if number not in _DISK:
        return UserError(f"{shown}: the system refuses it ({reason}): choose another path, or fix its permissions")
    about = "" if size is None else f" for its {byte_size(size)}"
    if place is not None:
        disk = os.path.abspath(shown)
        while not os.path.ismount(disk):
            disk = os.path.dirname(disk)
        usage = shutil.disk_usage(disk)
        about += f", {byte_size(usage.free)} of {byte_size(usage.total)} are free on the disk at {disk}"
    return UserError(f"{shown}: {reason}{about}: free some, or give another folder; {kept}")


def byte_size(size: float | None) -> str:
    """Format a number of bytes in kB, MB or GB (powers of ten)."""
    if size is None:
        return "–"
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / 1e3:.1f} kB"


def write_text(path: Path, text: str) -> None:
    """Write a text file; create its folder if necessary. Raises UserError if it cannot be written."""
    part = path.with_name(f"{path.name}{_PART}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path, error: Exception, size: int | None = None) -> UserError:
    """Return the sentence for an error of the system while a file or folder was written, of `size` bytes if known."""
    refused = explain_refusal(error, path, size)
    return UserError(f"{path}: it cannot be written ({error}): choose another folder") if refused is None else refused


def is_unused(folder: Path, *others: str) -> bool:
    """Return whether a folder has only entries of these names, and what a killed process may have left half written."""
    return all(entry.name in others or entry.name.endswith(_PART) for entry in folder.iterdir())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_json(path: Path, value: Any) -> None:
    """Append a plain JSON value as a line of its own. Raises UserError if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            # One line at a time: whoever reads it sees whole lines, except for an interrupted last one.
            file.write(json.dumps(value, separators=(",", ":")) + "\n")
    except OSError as error:
        raise write_error(path, error) from error


def cut_half_line(path: Path) -> None:
    """Remove half a line that an interrupted `append_json` has left at the end of a file."""
    content = path.read_bytes()
    end_of_lines = content.rfind(b"\n") + 1
    if end_of_lines < len(content):
        os.truncate(path, end_of_lines)


def sync(path: Path) -> None:
    """Wait until a file and its name in the folder are on the disk, so that a power failure cannot lose them."""
    for entry in (path, path.parent):
        descriptor = os.open(entry, os.O_RDONLY)
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
    # Only such an escape makes one; the check itself writes the whole value again.
    if ("\\ud" in text or "\\uD" in text) and has_half_surrogate(value):
        place = max(text.find("\\ud"), text.find("\\uD"))
        raise json.JSONDecodeError("a \\ud... escape without its other half, which is no character", text, place)
    return value


def _place(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return 0 if match is None else match.start()


def has_half_surrogate(value: Any) -> bool:
    """Return whether a text in a JSON value has half of a surrogate pair, which no file and no tokenizer takes."""
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
        raise UserError(f"{name}:{error.lineno}: not valid JSON ({error.msg}): fix or replace it") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text: fix or replace it") from error


def check_new(folder: Path) -> None:
    """Raise a UserError if a folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty; give another folder or remove it")


@contextmanager
def new_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `path` if the block ends without an exception.

    Temporary folders of `path` that killed processes have left are removed first.

    Raises UserError if `path` exists and is not an empty folder, or if it cannot be written.
    """
    final = Path(path)
    check_new(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_abandoned(final.parent, final.name)
        with temporary_folder(final) as partial:
            yield partial
            apply_umask(partial)  # mkdtemp lets only the owner in
            partial.replace(final)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or explain_refusal(error) is not None:
            raise write_error(final, error) from error
        raise


@contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """Yield a new folder beside `final`, which is removed at the end of the block unless it has been moved away.

    It is locked, so that `remove_abandoned` knows it from those that killed processes have left.
    """
    while True:
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=_PART, dir=final.parent))
        lock = os.open(partial, os.O_RDONLY)
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if partial.is_dir():  # another process may have taken it for abandoned before it was locked
            break
        os.close(lock)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def final_path(path: Path | str) -> Path:
    """Return the path that a folder of `temporary_folder` gets in the end; any other path as it is."""
    path = Path(path)
    name = re.fullmatch(rf"\.(.+)\.[^.]+{re.escape(_PART)}", path.name)
    return path if name is None else path.with_name(name[1])


def try_lock(file: IO[str]) -> bool:
    """Lock an open file until it is closed; False if another process holds it, and True where no locks are."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX lets a system choose between these two
        return False
    except OSError:
        pass  # some network file systems have no locks
    return True


def apply_umask(path: Path) -> None:
    """Give a file, or a whole folder, the permissions that the umask allows: safetensors lets only the owner read."""
    umask = os.umask(0o077)  # it cannot be read without being set
    os.umask(umask)
    for entry in (path, *path.rglob("*")):
        entry.chmod((0o777 if entry.is_dir() else 0o666) & ~umask)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove the temporary folders in a folder that killed processes have left, by default those of every name."""
    of_name = r"\..+\." if name is None else re.escape(f".{name}.")
    pattern = re.compile(of_name + "[a-z0-9_]{8}" + re.escape(_PART))  # as tempfile.mkdtemp makes them
    for left in folder.iterdir():
        if pattern.fullmatch(left.name) is None:
            continue
        with suppress(OSError):
            # No link is followed: it may lead to a folder that is not ours.
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # The process that writes it holds the lock as long as it lives.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(descriptor)
