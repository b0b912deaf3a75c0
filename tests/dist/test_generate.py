"""The generate command under the launcher: the same file on two ranks as on one, and after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BATCHES = 12


def asked(teacher: Path, output: Path) -> list[str]:
    given = f"--data embedded:train --limit {4 * BATCHES} --batch_size 4 --max_prompt_length 128 --max_length 160"
    more = ["--dtype", "fp32", "--engine", "hf", "--seed", "3", "--output", str(output)]
    return ["generate", "--model", str(teacher), *given.split(), *more]


@pytest.fixture(scope="module")
def whole(tiny_teacher, launch, tmp_path_factory):
    """What one rank writes undisturbed."""
    output = tmp_path_factory.mktemp("answers") / "whole.jsonl"
    launch(*asked(tiny_teacher, output), program="llmdistill.cli")
    return output


def finished_batches(output: Path) -> int:
    return sum(path.read_text().count("\n") for path in output.with_name(f"{output.name}.parts").glob("rank-*.jsonl"))


def test_two_ranks_write_the_file_of_one(tiny_teacher, whole, launch, tmp_path):
    output = tmp_path / "two.jsonl"
    said = launch(*asked(tiny_teacher, output), program="llmdistill.cli", ranks=2).stdout
    assert output.read_bytes() == whole.read_bytes()
    assert len(output.read_text().splitlines()) == 4 * BATCHES
    assert said.count(f"{4 * BATCHES} answers of {tiny_teacher}") == 1
    records = [json.loads(path.with_name(f"{path.name}.provenance.json").read_text()) for path in (whole, output)]
    for record in records:
        del record["finished"]
    assert records[0] == records[1]


def test_killed_and_resumed_on_another_number_of_ranks_the_file_is_byte_equal(
    tiny_teacher, whole, rank_server, launch, tmp_path
):
    output = tmp_path / "killed.jsonl"
    job = rank_server.start(asked(tiny_teacher, output), program="llmdistill.cli", ranks=2)
    job.kill_when(lambda: finished_batches(output) >= 3)
    kept = finished_batches(output)
    assert 3 <= kept < BATCHES, "the run was over before it could be killed"
    assert not output.exists()
    said = launch(*asked(tiny_teacher, output), program="llmdistill.cli")
    assert f"{kept} of {BATCHES} batches are there already" in said.stdout + said.stderr
    assert output.read_bytes() == whole.read_bytes()
