"""Checks of what a run has made already, before a later start of the same command relies on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.artifacts import MANIFEST, manifest_damage
from llmdistill.errors import UserError
from llmdistill.models.load import folder_damage
from llmdistill.report.metrics_log import METRICS_LOG


def check_made(folder: Path) -> None:
    """Check the student of a run's folder, trained and untrained, and its log, as far as they are there.

    The files are read once and hashed, at about 1.8 GB/s on one core: 9 seconds for a student of 16 GB, while scoring
    or exporting it reads the same bytes. Sizes alone would miss a flipped byte.

    Raises:
        UserError: a file is not as it was written; the message says how to make it again.
    """
    for name, again in (("untrained", "makes it again"), ("student", "trains it again from the last checkpoint")):
        made = folder / name
        if made.is_dir() and any(made.iterdir()):
            damage = folder_damage(made)
            if damage is not None:
                raise UserError(f"{damage}; remove {made}, and the same command {again}")
    damage = manifest_damage(folder) if (folder / "student").is_dir() else None
    if damage is not None:
        raise UserError(
            f"{damage}; put the log back as it was, or remove {folder / MANIFEST} to have it reported as it is"
        )


def check_log(folder: Path, step: int, entry: Mapping[str, Any] | None) -> None:
    """Check that a run's log begins with the rows that it had when the checkpoint of a step was saved.

    Args:
        folder: the run's folder. A log that the user has removed is no damage.
        step: the step of the checkpoint.
        entry: size and sha256 of the log at that time; None if there was none.

    Raises:
        UserError: the rows have changed.
    """
    file = folder / METRICS_LOG
    if entry is None or not file.is_file():
        return
    with file.open("rb") as log:
        rows = log.read(entry["bytes"])
    if hashlib.sha256(rows).hexdigest() != entry["sha256"]:
        raise UserError(
            f"{file}: its rows up to step {step} changed after they were written; put the file back as it was, or "
            "remove it to go on without these rows"
        )
