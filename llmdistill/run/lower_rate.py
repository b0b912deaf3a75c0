"""A run that ended because its loss or gradient was not finite may be resumed with a lower learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.run.callbacks.finite import ENDED, NOT_FINITE

_EARLIER = "earlier_learning_rates"
"""Key in the record of a run: the peak learning rates that it had before, the first one first."""


def with_lowered_rate(folder: Path, old: Mapping[str, Any], new: dict[str, Any]) -> Mapping[str, Any]:
    """Return the old record with the reduced learning rate, and add the earlier learning rate to the new record.

    A resumed run must have the settings that it began with, if they change its student. The learning rate is one of
    them; it may be reduced only after a step whose loss or gradient was not finite, because the run could not continue
    otherwise.
    """
    earlier = list(old.get(_EARLIER, ()))
    before, now = (record["config"]["train"]["learning_rate"] for record in (old, new))
    ended = (
        read_record(folder / NOT_FINITE / ENDED, remedy="remove the file", keys={"learning_rate": float})
        if now < before
        else None
    )
    if ended is not None and ended["learning_rate"] == before:
        earlier.append(before)
        old = {**old, "config": {**old["config"], "train": {**old["config"]["train"], "learning_rate": now}}}
    if earlier:
        new[_EARLIER] = earlier
    return old


def rate_warnings(record: Mapping[str, Any]) -> list[str]:
    """Return the warning for the report of a run whose learning rate was reduced; none for other runs."""
    earlier = record.get(_EARLIER, [])
    if not earlier:
        return []
    rates = ", then ".join(f"{each:g}" for each in earlier)
    return [
        f"the learning rate was {rates} until the loss or the gradient was not finite; the run went on from its last "
        f"checkpoint with {record['config']['train']['learning_rate']:g}"
    ]
