"""Nothing that is loaded runs code: pickles and modules beside the files that commands read, and in their place."""

from __future__ import annotations

import json
import pickle
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage import kinds
from peft import LoraConfig, get_peft_model
from planted import MODULES, PICKLES, Payload, plant
from transformers import LlamaForCausalLM

from llmdistill.artifacts import MANIFEST
from llmdistill.cli import main as command
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

from support import interrupted_copy


@pytest.fixture
def marker(tmp_path) -> Path:
    return tmp_path / "code ran"


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
    for name in ("whole", "cut"):  # the one reads no checkpoints, and the other has nothing else of its own
        run = base / f"pickled-{name}"
        shutil.copytree(finished, run) if name == "whole" else interrupted_copy(finished, run)
        for manifest in (run / MANIFEST, run / "student" / MANIFEST, run / "untrained" / MANIFEST):
            manifest.unlink(missing_ok=True)
        kept = run.with_name("kept")
        shutil.copytree(run, kept)
        for kind, files in kinds(run).items():
            is_json = kind.endswith((".json", ".jsonl"))  # whose readers cannot run code
            if is_json or kind.startswith("checkpoints") != (name == "cut"):
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


@pytest.fixture
def runs(marker, capsys, caplog, monkeypatch, tmp_path) -> Callable[..., int]:
    """Runs a command in this process; it must end well, or with one sentence, and may not run planted code."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))

    def run(*words: str, codes: tuple[int, ...] = (0,)) -> int:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        capsys.readouterr()
        caplog.clear()
        try:
            code = command(words)
        except SystemExit as end:  # of commands that have codes of their own
            code = int(str(end.code))
        spoken, said = capsys.readouterr()
        assert code in codes, said + spoken
        assert code != 2 or said.count("error: ") == 1, said
        assert "Traceback" not in said
        assert not marker.exists(), words
        return code

    return run


def test_checks_and_suites_run_no_code_of_the_models_they_read(finished, base, settings, runs, tmp_path, marker):
    run, teacher = tmp_path / "run", tmp_path / "teacher"
    shutil.copytree(finished, run)
    shutil.copytree(base / "teacher", teacher)
    plant(run, marker)
    plant(teacher, marker)
    given = [*settings, "--teacher.model", str(teacher), "--output_dir", str(run)]
    runs("plan", *given, "--gpus", "1", codes=(0, 2))
    runs("doctor", *given, codes=(0, 1))
    text = ["--text", "Where is 3?", "--max_length", "8"]
    speed = ["--batches", "1", "--warmup", "0", "--batch_size", "1", "--max_length", "4"]
    for name, words in (("attention", text), ("speed", speed)):
        output = tmp_path / name
        for _ in range(2):  # the second time over its own planted folder
            runs("evaluate", "--suite", name, "--model", f"{run},again={teacher}", "--output_dir", str(output), *words)
            plant(output, marker)


def test_what_a_run_reads_beside_its_teacher_runs_no_code(base, settings, trains, runs, tmp_path, marker):
    statistics, tokens, cache = (tmp_path / name for name in ("statistics", "tokens", "cache"))
    runs("cache", *settings, "--output", str(cache))
    kept = ["--student.factorize.calibration.folder", str(statistics), "--student.factorize.weighting", "activations"]
    kept += ["--student.factorize.calibration.examples", "4", "--data.cache_dir", str(tokens)]
    for number in range(2):
        cached = ["--teacher.cache", str(cache)] if number else []
        code, said = trains(tmp_path / f"run-{number}", *kept, *cached, "--scoring.models", "[]")
        assert code == 0, said
        assert not marker.exists()
        assert list(statistics.glob("activations/*.safetensors"))
        assert list(tokens.rglob("*.arrow"))
        for folder in (statistics, tokens, cache):
            plant(folder, marker)


def test_adapters_and_bare_tokenizers_run_no_code(base, settings, trains, runs, tmp_path, marker):
    adapter = tmp_path / "adapter"
    shutil.copytree(base / "teacher", tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(adapter)
    about = adapter / "adapter_config.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "base_model_name_or_path": "../base"}))
    plant(adapter, marker)
    plant(tmp_path / "base", marker)
    student = tmp_path / "student"
    runs("compress", "--model", str(adapter), "--rank", "4", "--output", str(student))
    limits = ["--max_length", "60", "--max_prompt_length", "50"]
    scoring = ["--data", str(base / "rows.jsonl"), "--limit", "1", *limits, "--output", str(tmp_path / "out")]
    runs("evaluate", "--model", str(adapter), *scoring)
    assert trains(tmp_path / "run", "--teacher.model", str(adapter), "--scoring.models", "[]")[0] == 0
    (adapter / "adapter_model.safetensors").unlink()  # the pickled one is left
    runs("compress", "--model", str(adapter), "--rank", "4", "--output", str(student / "again"), codes=(2,))
    bare = tmp_path / "words"
    load_tokenizer(str(base / "teacher")).save_pretrained(bare)
    plant(bare, marker)
    assert load_tokenizer(str(bare)).encode("Where")
    assert not marker.exists()
