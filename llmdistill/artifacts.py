"""What was asked for and what came of it: one fingerprint of models and files, one comparison of old and new records.

A record is a plain JSON object that says what was asked for. It is kept beside the result, so that a later command
knows whether the same result is wanted again, whether it is finished, and otherwise which setting differs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.errors import UserError
from llmdistill.files import write_json

RESULT_FILE = "result.json"


class State(Enum):
    """How far the thing asked for is."""

    NEW = "new"
    UNFINISHED = "goes on"
    FINISHED = "finished"


class Difference(NamedTuple):
    """A setting that two records do not share."""

    key: str
    """Dotted."""
    old: Any
    new: Any


def plain(value: Any) -> Any:
    """A value as JSON gives it back: tuples are lists, keys are strings."""
    return json.loads(json.dumps(value))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The settings in which two records differ, those of the old record first."""
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
    free: Collection[str] = (),
) -> State:
    """Whether what is asked for is new, goes on or is finished.

    Args:
        old: the record that is kept, None where there is none.
        new: what is asked for now.
        finished: whether the result of the old record is complete.
        subject: whose record it is, the beginning of the message.
        remedy: what the user can do, the end of the message.
        free: dotted keys of settings that do not matter as far as the result is by now.

    Raises:
        UserError: the records differ; the message names the first setting, its old and new value, and how many more.
    """
    if old is None:
        return State.NEW
    found = [each for each in differences(old, new) if each.key not in free]
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{subject}: {first.key} was {first.old} and is now {first.new}{more}; {remedy}")
    return State.FINISHED if finished else State.UNFINISHED


def read_record(file: Path, *, remedy: str) -> dict[str, Any] | None:
    """The JSON object in a file, or None where there is no file.

    Raises:
        UserError: the file holds no JSON object; the message ends with the remedy.
    """
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
    """The result that `write_result` kept, with its record under "asked"; None where there is none for this record."""
    kept = read_record(file, remedy="remove the file, and its result is made again")
    return kept if kept is not None and not differences(kept.get("asked", {}), asked) else None


def write_result(file: Path, asked: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Keep a result with the record of what was asked for; returns what `read_result` gives back."""
    kept = {"asked": plain(asked), **result}
    write_json(file, kept)
    return kept


def read_finished(folder: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result of a finished folder, with its record under "asked"; None where the folder is not finished.

    Raises:
        UserError: the folder holds the result of other settings, or its file is damaged.
    """
    kept = read_record(folder / RESULT_FILE, remedy="remove the folder, and the run is done again")
    if kept is None:
        return None
    subject = f"{folder}: this run was done with other settings"
    remedy = "give another --output_dir, or the same settings to go on"
    compare_records(kept.get("asked", {}), asked, finished=True, subject=subject, remedy=remedy)
    return kept


def write_finished(folder: Path, asked: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Mark a folder as finished; returns what `read_finished` gives back."""
    return write_result(folder / RESULT_FILE, asked, result)
