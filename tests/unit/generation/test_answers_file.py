from __future__ import annotations

import json
from pathlib import Path

import pytest
from damage import flip

from llmdistill.errors import UserError
from llmdistill.fingerprints import file_sha256, fingerprint
from llmdistill.generation import answers_file
from llmdistill.generation.answers_file import append_batch, check_teacher, read_batches, side_file


def write_record(data: Path, **record: object) -> None:
    side_file(data).write_text(json.dumps({"output_sha256": file_sha256(data), **record}), encoding="utf-8")


def test_the_teacher_that_wrote_the_answers_passes_and_another_does_not(teacher: Path, data: Path) -> None:
    hash_now = fingerprint(teacher)
    write_record(data, teacher="gpt2-xl", teacher_fingerprint=hash_now)
    assert check_teacher(data, teacher) is None
    write_record(data, teacher="gpt2-xl", teacher_fingerprint="sha256:abc")
    assert check_teacher(str(data), str(teacher)) == (
        f"{data}: its answers were written by gpt2-xl (sha256:abc), not by the teacher {teacher} ({hash_now})."
    )


def test_answers_of_unknown_or_changed_origin_are_said_to_be(teacher: Path, data: Path) -> None:
    assert "there is no prompts.jsonl.provenance.json beside it" in (check_teacher(data, teacher) or "")
    write_record(data, teacher="t", teacher_fingerprint=fingerprint(teacher))
    before = file_sha256(data)
    data.write_text(data.read_text() + "\n")
    said = f"it changed after it was generated (sha256 {before} then, {file_sha256(data)} now)"
    assert said in (check_teacher(data, teacher) or "")
    side_file(data).write_text("[")
    with pytest.raises(UserError, match=r"provenance\.json: not valid JSON"):
        answers_file.read_provenance(data)


def test_a_line_that_is_no_finished_batch_is_named(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    answers_file.parts_folder(output).mkdir()
    append_batch(output, 0, 3, {7: [1, 22, 3]})
    append_batch(output, 0, 4, {8: [5]})
    assert read_batches(output) == {3: {7: [1, 22, 3]}, 4: {8: [5]}}
    file = answers_file.parts_folder(output) / "rank-0.jsonl"
    with flip(file, -2, 6), pytest.raises(UserError, match=rf"{file.name}:2: not a finished batch; remove the line"):
        read_batches(output)
