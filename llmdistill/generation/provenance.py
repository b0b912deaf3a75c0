"""The provenance record beside a training set: which model wrote the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.embedded import locate
from llmdistill.fingerprints import file_sha256, fingerprint
from llmdistill.models.load import downloaded


def side_file(data: Path) -> Path:
    """Return the path of the provenance record of a file of answers."""
    return data.with_name(f"{data.name}.provenance.json")


def read_provenance(data: str | Path) -> dict[str, Any] | None:
    """Read the provenance record of a file of answers, or return None if there is no record.

    Raises:
        UserError: the record is not a JSON object.
    """
    return read_record(side_file(Path(data)), remedy="generate the answers again, or remove it")


def check_teacher(data: str | Path, teacher: str | Path) -> str | None:
    """Check that the teacher wrote the answers in `data`; returns a warning if that is not certain, else None.

    Raises:
        UserError: the teacher is not a model folder, or the record beside the data cannot be read.
    """
    path = locate(str(data))
    record = read_provenance(path)
    if record is None:
        return (
            f"{data}: there is no {side_file(path).name} beside it, so nothing says which model wrote its answers; "
            "`llmdistill generate` makes both."
        )
    said = []
    own, recorded = model_fingerprint(locate(str(teacher))), record.get("teacher_fingerprint")
    if own != recorded:
        said.append(
            f"{data}: its answers were written by {record.get('teacher')} ({recorded}), not by the teacher "
            f"{teacher} ({own})."
        )
    now = file_sha256(path) if path.is_file() else "missing"
    if now != record.get("output_sha256"):
        said.append(
            f"{data}: it changed after it was generated (sha256 {record.get('output_sha256')} then, {now} now), "
            f"so {side_file(path).name} does not tell who wrote what it holds."
        )
    return " ".join(said) or None


def model_fingerprint(path: str | Path) -> str:
    """Return the fingerprint of the model in a folder, or of the downloaded files of a hub name.

    Raises:
        UserError: the folder has no safetensors, or a file is damaged.
    """
    return fingerprint(downloaded(path))
