"""Damage to any file of a run's folder: the same command names it or makes the file again, and never uses it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import damage, kinds
from transformers import AutoModelForCausalLM

from llmdistill.artifacts import MANIFEST
from llmdistill.cli import main as command
from llmdistill.errors import UserError
from llmdistill.training.inputs import RunInputs

from support import interrupted_copy


def unseen(folder: Path, again: Callable[[], tuple[int, str]], *, but: tuple[str, ...] = ()) -> list[str]:
    """Damage a file of every kind, and do something again; returns the kinds that go unnoticed.

    Of checkpoints and the like the last one is taken, which is the one that is read; of a model's files, which are all
    in its manifest, the weights and the manifest. `again` returns the exit code and all that was said. Each time begins
    with the folder as it is now.
    """
    kept, found = folder.with_name("kept"), []
    shutil.copytree(folder, kept)
    for kind, (*_, file) in kinds(folder).items():
        name = kind.removeprefix("student/").removeprefix("untrained/")
        if kind.startswith(but) or (name != kind and name not in ("model.safetensors", MANIFEST)):
            continue
        with damage(file):
            damaged = file.read_bytes()
            code, said = again()
            assert code in (0, 2), kind
            assert code == 0 or "error: " in said, kind
            is_named = file.name in "".join(said.replace("│", "").split())
            is_made_again = code == 0 and file.is_file() and file.read_bytes() != damaged
            if not (is_named or is_made_again):
                found.append(kind)
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    shutil.rmtree(kept)
    return found


def test_every_kind_of_file_of_a_finished_run(finished, trains):
    assert trains(finished)[0] == 0
    for made in (finished / "student", finished / "untrained"):
        listed = json.loads((made / MANIFEST).read_text())["files"]
        assert {*listed} == {each.name for each in made.iterdir()} - {MANIFEST, "README.md"}
    assert {"student/model.safetensors", "scores/student.json", "metrics.jsonl", "run.json"} <= kinds(finished).keys()
    # A finished run reads neither a checkpoint nor its log, and an unfinished one what it began with.
    assert unseen(finished, lambda: trains(finished), but=("checkpoints", "untrained", "metrics.jsonl")) == []


def test_every_kind_of_file_of_an_unfinished_run(finished, base, trains):
    run = interrupted_copy(finished, base / "unfinished")
    assert len(kinds(run)["checkpoints/step-N/manifest.json"]) == 2
    assert unseen(run, lambda: trains(run), but=("run.json",)) == []
    log = run / "metrics.jsonl"
    with damage(log):
        code, said = trains(run)
    assert (code, "it lacks rows up to step" in said) == (2, True)
    log.write_text(log.read_text().replace('"step": 1,', '"step" 1,', 1))
    code, said = trains(run)
    assert (code, "metrics.jsonl:1" in said) == (2, True)


def test_the_remedies_work(finished, base, trains):
    run = base / "fixed"
    shutil.copytree(finished, run)
    made = run / "untrained"
    before = (made / "model.safetensors").read_bytes()
    (made / "model.safetensors").write_bytes(b"")
    assert f"remove {made}, and the same command" in trains(run)[1]
    shutil.rmtree(made)
    assert trains(run)[0] == 0
    assert (made / "model.safetensors").read_bytes() == before


def test_every_kind_of_file_of_a_teachers_cache(base, settings, trains, capsys, monkeypatch):
    cache = base / "cache"

    def make() -> tuple[int, str]:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        capsys.readouterr()
        code = command(["cache", *settings, "--output", str(cache)])
        return code, capsys.readouterr().err

    assert make()[0] == 0
    assert {"cache.json", "shards/N.safetensors"} <= kinds(cache).keys()
    assert unseen(cache, make) == []

    def use() -> tuple[int, str]:
        shutil.rmtree(base / "learns", ignore_errors=True)
        short = ("--train.steps", "1", "--scoring.models", "[]")
        return trains(base / "learns", "--teacher.cache", str(cache), *short)

    assert unseen(cache, use) == []


def test_every_kind_of_file_of_the_inputs_that_a_call_from_python_keeps(base, tmp_path):
    """The same call checks them, or writes them again; their models and data are in memory."""
    model = AutoModelForCausalLM.from_pretrained(base / "teacher")
    rows = [{"instruction": f"Where is {n}?", "output": f"In town {n % 3}."} for n in range(4)]
    given = RunInputs(model, None, rows, rows[:2], {}, None, {"zero_optimization": {"stage": 1}})

    def save() -> None:
        given.save(given.make_config({"method": "kd", "student.factorize.rank": 4}, {}, tmp_path))

    save()
    save()
    found = kinds(tmp_path / "inputs")
    assert {"teacher-N/model.safetensors", "teacher-N/tokenizer.json", "data-N.jsonl", "ds_config.json"} <= found.keys()
    for kind, files in found.items():
        for file in files:
            before = file.read_bytes()
            with damage(file):
                if kind == "ds_config.json":
                    save()
                    assert file.read_bytes() == before
                else:
                    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}.*; remove .*, and the same call"):
                        save()
