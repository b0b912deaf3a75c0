"""Nothing that is loaded runs code: pickles and modules beside the files that commands read, and in their place."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import kinds

from llmdistill.artifacts import MANIFEST
from llmdistill.cli import main as command
from llmdistill.models.load import load_model

from support import interrupted_copy

PICKLES = (
    *("pytorch_model.bin", "training_args.bin", "adapter_model.bin", "tf_model.h5", "flax_model.msgpack"),
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "mp_rank_00_model_states.pt", "zero_optim_states.pt"),
    *("tokenizer.pkl", "vocab.pkl", "model.pt", "data.npy", "statistics.pt", "rank-00001.pt"),
)
MODULES = (
    "modeling_mine.py",
    "configuration_mine.py",
    "tokenization_mine.py",
    "__init__.py",
    "custom_generate/generate.py",
)
AUTO_MAP = {
    "AutoConfig": "configuration_mine.Mine",
    "AutoModelForCausalLM": "modeling_mine.Mine",
    "AutoTokenizer": ["tokenization_mine.Mine", None],
}


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "code ran"


def plant(folder: Path, marker: Path) -> None:
    """Plant code in a folder and in the folders below: files of many names, and configurations that name them."""
    for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        for name in PICKLES:
            torch.save(Payload(marker), each / name)
        for name in MODULES:
            (each / name).parent.mkdir(exist_ok=True)
            (each / name).write_text(f"import os\nos.mkdir({str(marker)!r})\n")
        for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
            if (each / name).is_file():
                content = json.loads((each / name).read_text())
                (each / name).write_text(json.dumps({**content, "auto_map": AUTO_MAP, "custom_generate": "."}))
        (each / MANIFEST).unlink(missing_ok=True) if (each / "config.json").is_file() else None


def test_the_planted_code_would_run(tmp_path, marker):
    plant(tmp_path, marker)
    for name in PICKLES:
        torch.load(tmp_path / name, weights_only=False)
        marker.rmdir()
    for name in MODULES:
        runpy.run_path(str(tmp_path / name))
        marker.rmdir()


def test_no_command_runs_code_beside_the_files_it_reads(
    finished, base, settings, trains, tmp_path, marker, capsys, monkeypatch
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    run, teacher = interrupted_copy(finished, base / "planted"), tmp_path / "teacher"
    shutil.copytree(base / "teacher", teacher)
    plant(run, marker)
    assert trains(run)[0] == 0
    plant(run, marker)
    assert trains(run)[0] == 0
    plant(teacher, marker)
    rows, student = str(base / "rows.jsonl"), str(run / "student")
    limits = ["--max_length", "60", "--max_prompt_length", "50"]
    commands = {
        "evaluate": ["--model", student, "--data", rows, "--decoding", "greedy", "--limit", "1", *limits],
        "export": ["--to", "dense", "--model", student],
        "compress": ["--model", str(teacher), "--rank", "4"],
        "generate": ["--model", str(teacher), "--data", rows, "--limit", "1", *limits],
        "cache": [*settings, "--teacher.model", str(teacher)],
    }
    for name, arguments in commands.items():
        for again in range(2):  # the second time over its own planted folder
            output = tmp_path / "outputs" / name
            output.parent.mkdir(exist_ok=True)
            monkeypatch.delenv("WORLD_SIZE", raising=False)
            capsys.readouterr()
            code = command([name, *arguments, "--output", str(output)])
            said = capsys.readouterr().err
            assert code == 0 or (again and "error: " in said), (name, said)
            assert not marker.exists(), name
            if output.is_dir():
                plant(output, marker)
    load_model(student, dtype="auto")
    assert not marker.exists()


def test_no_command_unpickles_a_file_that_it_reads(finished, base, trains, marker):
    for name, but in (("whole", "checkpoints"), ("cut", "student")):
        run = base / f"pickled-{name}"
        shutil.copytree(finished, run) if name == "whole" else interrupted_copy(finished, run)
        for manifest in (run / MANIFEST, run / "student" / MANIFEST, run / "untrained" / MANIFEST):
            manifest.unlink(missing_ok=True)
        kept = run.with_name("kept")
        shutil.copytree(run, kept)
        for kind, files in kinds(run).items():
            if kind.startswith((but, "scores", "predictions")) and kind != "scores/student.json":
                continue
            for file in files:
                torch.save(Payload(marker), file)
            code, said = trains(run)
            assert code in (0, 2), kind
            assert code == 0 or said.count("error: ") == 1, kind
            assert not marker.exists(), kind
            shutil.rmtree(run)
            shutil.copytree(kept, run)
        shutil.rmtree(kept)
    assert pickle.loads(pickle.dumps(Payload(marker))) is None
    assert marker.exists()
