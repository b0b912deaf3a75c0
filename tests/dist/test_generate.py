"""The generate command under the launcher: the same file on two ranks as on one, and after a kill."""

import json
from pathlib import Path

BATCHES = 12


def asked(teacher: Path, output: Path) -> list[str]:
    given = f"--data embedded:train --limit {4 * BATCHES} --batch_size 4 --max_prompt_length 128 --max_length 160"
    more = ["--dtype", "fp32", "--engine", "hf", "--seed", "3", "--output", str(output)]
    return ["generate", "--model", str(teacher), *given.split(), *more]


def finished_batches(output: Path) -> int:
    return sum(path.read_text().count("\n") for path in output.with_name(f"{output.name}.parts").glob("rank-*.jsonl"))


def test_killed_on_one_rank_and_resumed_on_two_the_file_is_that_of_two(tiny_teacher, rank_server, launch, tmp_path):
    whole, output = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    said = launch(*asked(tiny_teacher, whole), program="llmdistill.cli", ranks=2).stdout
    assert said.count(f"{4 * BATCHES} answers of {tiny_teacher}") == 1
    assert len(whole.read_text().splitlines()) == 4 * BATCHES

    job = rank_server.start(asked(tiny_teacher, output), program="llmdistill.cli")
    job.kill_when(lambda: finished_batches(output) >= 3)
    kept = finished_batches(output)
    assert 3 <= kept < BATCHES, "the run was over before it could be killed"
    assert not output.exists()
    resumed = launch(*asked(tiny_teacher, output), program="llmdistill.cli", ranks=2)
    assert f"{kept} of {BATCHES} batches are there already" in resumed.stdout + resumed.stderr
    assert output.read_bytes() == whole.read_bytes()
    records = [json.loads(path.with_name(f"{path.name}.provenance.json").read_text()) for path in (whole, output)]
    for record in records:
        del record["finished"]
    assert records[0] == records[1]
