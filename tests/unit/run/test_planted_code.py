"""Nothing that is loaded runs code: pickles and modules beside the files that commands read, and in their place."""

from __future__ import annotations

import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from planted import MODULES, PICKLES, plant

import llmdistill
from llmdistill.cli import main as command

from support import interrupted_copy


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "code ran"


def test_no_command_runs_code_beside_the_files_it_reads(
    finished, base, settings, trains, tmp_path, marker, capsys, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    run, teacher = interrupted_copy(finished, base / "planted"), tmp_path / "teacher"
    shutil.copytree(base / "teacher", teacher)
    for _ in range(2):  # it is resumed, and it is finished
        plant(run, marker)
        assert trains(run)[0] == 0
        assert not marker.exists()
    plant(run, marker)
    plant(teacher, marker)
    rows, student = str(base / "rows.jsonl"), str(run / "student")
    limits = ["--limit", "1", "--max_length", "60", "--max_prompt_length", "50", "--output"]
    suite = ["evaluate", "--suite", "attention", "--model", f"{student},again={teacher}"]
    commands = [
        ["evaluate", "--model", student, "--data", rows, "--decoding", "greedy", *limits],
        [*suite, "--text", "Where is 3?", "--max_length", "8", "--output_dir"],
        ["export", "--to", "dense", "--model", student, "--output"],
        ["compress", "--model", str(teacher), "--rank", "4", "--output"],
        ["generate", "--model", str(teacher), "--data", rows, *limits],
        ["cache", *settings, "--teacher.model", str(teacher), "--output"],
    ]
    for number, words in enumerate(commands):
        output = tmp_path / f"output-{number}"
        for again in range(2):  # the second time over its own planted folder
            monkeypatch.delenv("WORLD_SIZE", raising=False)
            capsys.readouterr()
            code, said = command([*words, str(output)]), capsys.readouterr().err
            assert code == 0 or (again and said.count("error: ") == 1), (words, said)
            assert "Traceback" not in said
            assert not marker.exists(), words
            if output.is_dir():
                plant(output, marker)
    # The planted code would run.
    torch.load(run / PICKLES[0], weights_only=False)
    marker.rmdir()
    runpy.run_path(str(run / MODULES[0]))
    assert marker.exists()


def test_nothing_is_unpickled():
    """So a file in the place of another one runs no code either: the package reads tensors from safetensors alone."""
    unpickles = re.compile(r"\b(torch|np|joblib)\.load\(|\b(import|from) (pickle|dill|joblib|shelve|marshal)\b")
    found = [file for file in Path(llmdistill.__file__).parent.rglob("*.py") if unpickles.search(file.read_text())]
    assert found == []
