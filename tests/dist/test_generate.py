"""The generate command under the launcher: the same file on two ranks as on one, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support import ROOT, environment, launch_command

pytestmark = pytest.mark.dist

BATCHES = 24


def generate_command(teacher: Path, output: Path, *, ranks: int) -> list[str]:
    launcher = launch_command(ranks=ranks)
    assert launcher.pop() == "llmdistill/train.py"
    asked = ["--model", str(teacher), "--data", "embedded:train", "--limit", str(4 * BATCHES), "--batch_size", "4"]
    lengths = ["--max_prompt_length", "128", "--max_length", "192", "--dtype", "fp32", "--engine", "hf", "--seed", "3"]
    return [*launcher, "--no_local_rank", "--module", "llmdistill.cli", "generate", *asked, *lengths, "--output", str(output)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def whole(tiny_teacher, tmp_path_factory) -> Path:
    """What one rank writes undisturbed."""
    output = tmp_path_factory.mktemp("answers") / "whole.jsonl"
    run(generate_command(tiny_teacher, output, ranks=1))
    return output


def finished_batches(output: Path) -> int:
    return sum(path.read_text().count("\n") for path in output.with_name(f"{output.name}.parts").glob("rank-*.jsonl"))


def test_two_ranks_write_the_file_of_one(tiny_teacher, whole, tmp_path):
    output = tmp_path / "two.jsonl"
    said = run(generate_command(tiny_teacher, output, ranks=2)).stdout
    assert output.read_bytes() == whole.read_bytes()
    assert len(output.read_text().splitlines()) == 4 * BATCHES
    assert said.count(f"{4 * BATCHES} answers of {tiny_teacher}") == 1
    records = [json.loads(path.with_name(f"{path.name}.provenance.json").read_text()) for path in (whole, output)]
    for record in records:
        del record["finished"]
    assert records[0] == records[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_on_another_number_of_ranks_the_file_is_byte_equal(tiny_teacher, whole, tmp_path, ranks):
    output = tmp_path / "killed.jsonl"
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = generate_command(tiny_teacher, output, ranks=ranks)
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True, **silent)
    patience = time.monotonic() + 200
    while finished_batches(output) < 3 and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = finished_batches(output)
    assert 3 <= kept < BATCHES, "the run was over before it could be killed"
    assert not output.exists()
    said = run(generate_command(tiny_teacher, output, ranks=3 - ranks))
    assert f"{kept} of {BATCHES} batches are there already" in said.stdout + said.stderr
    assert output.read_bytes() == whole.read_bytes()
