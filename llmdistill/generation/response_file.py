"""The file of a teacher's answers: its rows, the record of who wrote it, and the finished batches before it exists.

OUTPUT.provenance.json beside the finished file says which model wrote it. Until then OUTPUT.parts holds request.json
with the request, and rank-R.jsonl with one line per batch, {"batch": number, "rows": {prompt: token ids}}. It does not
matter which rank wrote a line, so the generation can be resumed on any number of ranks. Whoever names a folder of parts
keeps it: outputs whose requests differ in their length alone then share what is generated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from llmdistill.artifacts import Difference, compare_records, read_record
from llmdistill.embedded import locate, locate_data
from llmdistill.errors import UserError
from llmdistill.files import append_json, cut_half_line, write_json
from llmdistill.fingerprints import file_sha256, fingerprint
from llmdistill.models.companions import download

_CONTENTS = {
    "teacher_fingerprint": "the model",
    "data_fingerprint": "the content of the prompts' file",
    "prompt_ids_fingerprint": "the tokens of the prompts",
}
"""What each fingerprint of a request stands for."""

Answers = dict[int, list[int]]
"""Index of a prompt -> its new tokens."""


def provenance_file(data: Path) -> Path:
    """Return the path of the provenance record of a file of answers."""
    return data.with_name(f"{data.name}.provenance.json")


def read_provenance(data: str | Path) -> dict[str, Any] | None:
    """Read the provenance record of a file of answers; None if there is none, a UserError if it is damaged."""
    return read_record(provenance_file(Path(data)), remedy="generate the answers again, or remove it")


def check_teacher(data: str | Path, teacher: str | Path) -> str | None:
    """Check that the teacher wrote the answers in `data`; return a warning if that is not certain, else None.

    Raises UserError if the teacher is not a model folder, or the record beside the data cannot be read.
    """
    path = locate_data(str(data))
    record = read_provenance(path)
    if record is None:
        return (
            f"{data}: there is no {provenance_file(path).name} beside it, so nothing says which model wrote its "
            "answers; `llmdistill generate` makes both."
        )
    warnings = []
    own, recorded = fingerprint(download(locate(str(teacher)))), record.get("teacher_fingerprint")
    if own != recorded:
        warnings.append(
            f"{data}: its answers were written by {record.get('teacher')} ({recorded}), not by the teacher "
            f"{teacher} ({own})."
        )
    now = file_sha256(path) if path.is_file() else "missing"
    if now != record.get("output_sha256"):
        warnings.append(
            f"{data}: it changed after it was generated (sha256 {record.get('output_sha256')} then, {now} now), "
            f"so {provenance_file(path).name} does not tell who wrote what it holds."
        )
    return " ".join(warnings) or None


def parts_folder(output: Path) -> Path:
    """Return the folder of the finished batches of an output file."""
    return output.with_name(f"{output.name}.parts")


def claim_output(
    output: Path,
    request: dict[str, Any],
    *,
    command: str = "llmdistill generate",
    begun: dict[str, Any] | None = None,
    kept_parts: Path | None = None,
    flags: str = "--",
) -> bool:
    """Check that an output is unused or belongs to this request; return whether it is already finished.

    `request` is everything that determines the rows, as plain JSON values, and `begun` what determines those of an
    unfinished output, by default the same. `kept_parts` is the folder of the finished batches if it outlives the
    output. `flags` stands before the names of settings in messages. Raises UserError if the output or its parts belong
    to another request, or the output was changed.
    """

    def say(difference: Difference) -> str:
        old, new = ("not given" if value is None else value for value in (difference.old, difference.new))
        if difference.key in _CONTENTS:
            return f"{_CONTENTS[difference.key]} differs ({old} then, {new} now)"
        return f"{flags}{difference.key.removeprefix('settings.')} was {old} and is now {new}"

    begun = request if begun is None else begun
    parts = kept_parts or parts_folder(output)
    earlier_request = read_record(parts / "request.json", remedy=f"remove {parts}, or choose another --output")
    if output.exists():
        record = read_provenance(output) if output.is_file() else None
        if record is not None:
            same = {key: record.get(key) for key in request}
            subject = f"{output} holds the answers to another request"
            compare_records(same, request, subject=subject, remedy="choose another --output", say=say)
            if file_sha256(output) != record.get("output_sha256"):
                raise UserError(f"{output} was changed after it was generated; choose another --output, or remove it")
            if kept_parts is None:
                shutil.rmtree(parts, ignore_errors=True)  # they are left if a kill came after the record
            return True
        # With an earlier request the command was killed before the record was written; both are written again.
        if earlier_request is None:
            raise UserError(
                f"{output} exists and has no {provenance_file(output).name}: `{command}` did not write it; "
                "choose another --output"
            )
    if earlier_request is not None:
        subject = f"{parts} holds batches of another request"
        remedy = "choose another --output, or remove that folder"
        compare_records(earlier_request, begun, subject=subject, remedy=remedy, say=say)
    elif any(parts.glob("rank-*.jsonl")):
        raise UserError(f"{parts} holds batches, but no request.json; remove that folder, or choose another --output")
    else:
        write_json(parts / "request.json", begun)
    provenance_file(output).unlink(missing_ok=True)  # the record of a file that no longer exists
    for file in parts.glob("rank-*.jsonl"):
        cut_half_line(file)  # its batch is generated again
    return False


def append_batch(parts: Path, rank: int, number: int, answers: Answers) -> None:
    """Append a finished batch to the file of this rank. Raises UserError if it cannot be written."""
    append_json(parts / f"rank-{rank}.jsonl", {"batch": number, "rows": answers})


def read_batches(parts: Path) -> dict[int, Answers]:
    """Read every finished batch, by its number."""
    batches: dict[int, Answers] = {}
    for path in sorted(parts.glob("rank-*.jsonl")):
        with path.open("rb") as file:
            for n, line in enumerate(file, start=1):
                try:
                    entry = json.loads(line)
                    # JSON has texts for keys.
                    batches[entry["batch"]] = {int(index): ids for index, ids in entry["rows"].items()}
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise UserError(f"{path}:{n}: not a finished batch; remove the line to have it redone") from error
    return batches
