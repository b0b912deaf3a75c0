"""Records of requested settings, saved with the result: how they are read, written and compared.

So a later command knows whether it requests the same result, whether it is finished, and which setting differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.errors import UserError
from llmdistill.files import write_json

RESULT_FILE = "result.json"


class State(Enum):
    """The progress of a requested result."""

    NEW = "new"
    UNFINISHED = "goes on"
    FINISHED = "finished"


class Difference(NamedTuple):
    """A setting, by its dotted key, whose value differs between two records."""

    key: str
    old: Any
    new: Any


def plain(value: Any) -> Any:
    """Convert a value to what JSON returns for it: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Return the settings in which two records differ; the settings of the old record come first."""
    return _differences(plain(old), plain(new), "")


def _differences(old: Any, new: Any, key: str) -> list[Difference]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [Difference(key, old, new)]
    names = [*old, *(name for name in new if name not in old)]
    return [
        difference
        for name in names
        for difference in _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    ]


def compare_records(
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any],
    *,
    finished: bool,
    subject: str,
    remedy: str,
) -> State:
    """Return whether the requested result is new, unfinished or finished.

    Args:
        old: the saved record; None if there is none.
        new: the record that is requested now.
        finished: whether the result of the old record is complete.
        subject: the owner of the record; the error message begins with it.
        remedy: what the user can do; the error message ends with it.

    Raises:
        UserError: the records differ; the message names the first setting, its old and new value, and how many more.
    """
    if old is None:
        return State.NEW
    found = differences(old, new)
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{subject}: {first.key} was {first.old} and is now {first.new}{more}; {remedy}")
    return State.FINISHED if finished else State.UNFINISHED


def read_record(file: Path, *, remedy: str) -> dict[str, Any] | None:
    """Read the JSON object in a file, None if there is no file; a UserError, which ends with the remedy, for others."""
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON; {remedy}") from error
    if not isinstance(record, dict):
        raise UserError(f"{file}: not a JSON object; {remedy}")
    return record


def read_result(file: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a result of `write_result`, with its record under "asked"; return None if the file has no such record."""
    kept = read_record(file, remedy="remove the file, and its result is made again")
    return kept if kept is not None and not differences(kept.get("asked", {}), asked) else None


def write_result(file: Path, asked: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Save a result with the record of its settings; return the same value as `read_result`."""
    kept = {"asked": plain(asked), **result}
    write_json(file, kept)
    return kept
