"""Records of requested settings, saved with the result: how they are read, written and compared.

So a later command knows whether it requests the same result, whether it is finished, and which setting differs.

A folder has a manifest of its files, so that damage shows before a later command relies on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.errors import UserError
from llmdistill.files import is_outside, new_folder, write_json
from llmdistill.fingerprints import file_damage, file_entry

RESULT_FILE = "result.json"
MANIFEST = "manifest.json"
"""File of a folder with the size of each of its files, and the sha256 of those that are no text."""
CARD = "README.md"
"""File of a model's folder for readers. Users complete it, so a manifest does not list it."""
PLACE = "USER/NAME"
"""Stands in the examples of a card for the model's folder or its name on the hub, which is known when it is pushed."""


class Difference(NamedTuple):
    """A setting, by its dotted key, whose value differs between two records."""

    key: str
    old: Any
    new: Any


def as_json(value: Any) -> Any:
    """Return what JSON makes of a value: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Return the settings in which two records differ; the settings of the old record come first."""
    # As JSON makes them, because one of the two was read from a file, where a tuple is a list.
    return _differences(as_json(old), as_json(new), "")


def _differences(old: Any, new: Any, key: str) -> list[Difference]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [Difference(key, old, new)]
    names = [*old, *(name for name in new if name not in old)]
    return [
        difference
        for name in names
        for difference in _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    ]


def say_difference(difference: Difference) -> str:
    """Return which value a setting had, and which it has now."""
    return f"{difference.key} was {difference.old} and is now {difference.new}"


def compare_records(
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any],
    *,
    subject: str,
    remedy: str,
    say: Callable[[Difference], str] = say_difference,
) -> None:
    """Raise a UserError if the requested record differs from the saved one, if there is one.

    It begins with `subject`, names the first setting, its old and new value as `say` puts them, and how many more, and
    ends with `remedy`.
    """
    changes = [] if old is None else differences(old, new)
    if changes:
        first = changes[0]
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        raise UserError(f"{subject}: {say(first)}{more}; {remedy}")


def find_record(file: Path, keys: Mapping[str, Any] | None = None) -> tuple[dict[str, Any] | None, str | None]:
    """Read a JSON object; return it, None if there is no file, and what is wrong with it, None if nothing is.

    `keys` are those that it must have, with the types of their values.
    """
    if not os.path.isfile(file):  # Path.is_file raises an error for a name that is too long
        return None, None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):  # too many levels
        return None, f"{file}: not valid JSON"
    except OSError as error:
        return None, f"{file}: it cannot be read ({error.strerror})"
    if not isinstance(record, dict):
        return None, f"{file}: not a JSON object"
    wrong = [key for key, kind in (keys or {}).items() if not isinstance(record.get(key), kind)]
    return (None, f"{file}: it has no {wrong[0]}, or one of another type") if wrong else (record, None)


def read_record(file: Path, *, remedy: str, keys: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Read a JSON object as `find_record` does; a UserError, which ends with the remedy, if it is damaged."""
    record, damage = find_record(file, keys)
    if damage is not None:
        raise UserError(f"{damage}; {remedy}")
    return record


def read_result(file: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a result of `write_result`, with its settings under "asked"; return None if it has other settings."""
    record = read_record(file, remedy="remove the file, and its result is made again")
    return record if record is not None and not differences(record.get("asked", {}), settings) else None


def write_result(file: Path, settings: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Save a result with its settings; return the same value as `read_result`."""
    record = {"asked": as_json(settings), **result}
    write_json(file, record)
    return record


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, with the `file_entry` of each of its files but its card.

    A GB takes about half a second on a CPU that has instructions for sha256 (1.8 GB/s measured on one core).
    """
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST, CARD}
    write_json(folder / MANIFEST, {"files": entries_of(folder, names)})


def entries_of(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the `file_entry` of files of a folder, by their names below it."""
    return {name: file_entry(folder / name) for name in sorted(names)}


def manifest_damage(folder: Path, part: slice = slice(None)) -> str | None:
    """Return what is wrong with the files of a folder, None if nothing is or it has no manifest.

    `part` is what is checked of the files in the order of their names, so that ranks can share the work.
    """
    manifest, damage = find_record(folder / MANIFEST, {"files": dict})
    return damage if manifest is None else entries_damage(folder, manifest["files"], part)


def entries_damage(folder: Path, entries: Mapping[str, Any], part: slice = slice(None)) -> str | None:
    """Return what is wrong with the files of `entries_of`, None if nothing is; the sizes are compared first."""
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int):
            return f"{folder / name}: nothing tells its size and sha256"
        if is_outside(folder, name):
            return f"{folder}: its record names {name!r}, which lies outside of the folder"
    files = [(folder / name, entries[name]) for name in sorted(entries)[part]]
    # A file of another size shows at once; to hash those before it may take minutes.
    cut = next((path for path, entry in files if os.path.isfile(path) and path.stat().st_size != entry["bytes"]), None)
    ordered = sorted(files, key=lambda file: file[0] != cut)
    return next((damage for path, entry in ordered if (damage := file_damage(path, entry)) is not None), None)


@contextmanager
def new_proven_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder as `new_folder` does, and write the manifest of its files at the end of the block."""
    with new_folder(path) as folder:
        yield folder
        write_manifest(folder)
