"""The finished batches of an unfinished file of answers; OUTPUT.parts holds them until all batches are finished.

request.json holds the request; rank-R.jsonl has one line per batch, {"batch": number, "rows": {prompt: token ids}}.
A line is written when its batch is finished, so an interrupted run loses only the batches in progress. It does not
matter which rank wrote a line, so the generation can be resumed on any number of ranks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from llmdistill.artifacts import compare_records, read_record
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.fingerprints import file_sha256
from llmdistill.generation.provenance import read_provenance, side_file

Rows = dict[int, list[int]]
"""Index of a prompt -> its new tokens."""


def parts_folder(output: Path) -> Path:
    """Return the folder of the finished batches of an output file."""
    return output.with_name(f"{output.name}.parts")


def claim_output(output: Path, request: dict[str, Any]) -> bool:
    """Check that an output is unused or belongs to this request; returns True if it is already finished.

    Args:
        output: the file of answers to write.
        request: everything that determines the answers, as plain JSON values.

    Raises:
        UserError: the output or its parts belong to another request, or the output was changed.
    """
    parts = parts_folder(output)
    asked = read_record(parts / "request.json", remedy=f"remove {parts}, or choose another --output")
    if output.exists():
        record = read_provenance(output) if output.is_file() else None
        if record is not None:
            _check_finished(output, record, request)
            shutil.rmtree(parts, ignore_errors=True)
            return True
        if asked is None:
            raise UserError(
                f"{output} exists and has no {side_file(output).name}: `llmdistill generate` did not write it; "
                "choose another --output"
            )
    if asked is not None:
        subject = f"{parts} holds batches of another request"
        remedy = "choose another --output, or remove that folder"
        compare_records(asked, request, finished=False, subject=subject, remedy=remedy)
    elif any(parts.glob("rank-*.jsonl")):
        raise UserError(f"{parts} holds batches, but no request.json; remove that folder, or choose another --output")
    else:
        write_json(parts / "request.json", request)
    side_file(output).unlink(missing_ok=True)  # the record of a file that no longer exists
    for file in parts.glob("rank-*.jsonl"):
        _drop_torn_line(file)
    return False


def append_batch(output: Path, rank: int, number: int, rows: Rows) -> None:
    """Append a finished batch to the file of this rank."""
    with (parts_folder(output) / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"batch": number, "rows": rows}, separators=(",", ":")) + "\n")


def read_batches(output: Path) -> dict[int, Rows]:
    """Read every finished batch, by its number."""
    batches: dict[int, Rows] = {}
    for path in sorted(parts_folder(output).glob("rank-*.jsonl")):
        with path.open(encoding="utf-8") as file:
            for n, line in enumerate(file, start=1):
                try:
                    entry = json.loads(line)
                    batches[entry["batch"]] = {int(index): ids for index, ids in entry["rows"].items()}
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise UserError(f"{path}:{n}: not a finished batch; remove the line to have it redone") from error
    return batches


def remove_parts(output: Path) -> None:
    """Remove the batches of a finished output."""
    shutil.rmtree(parts_folder(output), ignore_errors=True)


def _check_finished(output: Path, record: dict[str, Any], request: dict[str, Any]) -> None:
    same = {key: record.get(key) for key in request}
    subject = f"{output} holds the answers to another request"
    compare_records(same, request, finished=True, subject=subject, remedy="choose another --output")
    if file_sha256(output) != record.get("output_sha256"):
        raise UserError(f"{output} was changed after it was generated; choose another --output, or remove it")


def _drop_torn_line(file: Path) -> None:
    """Drop an incomplete last line, which an interrupted write leaves; its batch is generated again."""
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with file.open("r+b") as opened:
            opened.truncate(whole)
