"""The checkpoints of a run's folder, with an engine without ZeRO; tests/dist has its stages and ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from llmdistill.artifacts import MANIFEST
from llmdistill.errors import UserError
from llmdistill.run.checkpoints import checkpoints, load_checkpoint, save_checkpoint
from llmdistill.run.log import check_log
from llmdistill.runtime.distributed import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


class Engine:
    """A small model and AdamW in DeepSpeed's clothes."""

    def __init__(self, width: int = 4) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        self.module[1].bias.requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.module.parameters() if p.requires_grad], lr=0.1)
        self.global_steps = self.global_samples = self.micro_steps = 0
        self.skipped_steps = 0

    def zero_optimization_stage(self) -> int:
        return 0

    def train_batch_size(self) -> int:
        return 8

    def gradient_accumulation_steps(self) -> int:
        return 2

    def train(self, steps: range) -> None:
        for step in steps:
            self.module(torch.full((2, 3), step + 1.0)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [each.clone() for each in (*self.module.parameters(), *moments)]


def save(folder: Path, engine: Engine, step: int, keep: int = 2) -> None:
    save_checkpoint(engine, folder, step, keep, WORLD)


def test_a_restored_engine_goes_on_as_the_one_that_was_saved(tmp_path: Path) -> None:
    first, second = Engine(), Engine()
    assert load_checkpoint(second, tmp_path, WORLD) is None
    first.train(range(5))
    first.skipped_steps = 2
    save(tmp_path, first, 5)
    found = load_checkpoint(second, tmp_path, WORLD)
    assert found is not None
    assert (found.step, second.global_steps, second.micro_steps, second.global_samples) == (5, 5, 10, 40)
    assert second.skipped_steps == 2
    for engine in (first, second):
        engine.train(range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))
    assert [group["lr"] for group in second.optimizer.param_groups] == [0.1]
    assert [group["weight_decay"] for group in second.optimizer.param_groups] == [0.01]


def test_only_complete_checkpoints_count_and_the_newest_stay(tmp_path: Path) -> None:
    engine = Engine()
    engine.train(range(1))
    for step in (2, 4, 10):
        save(tmp_path, engine, step)
        (tmp_path / "checkpoints" / f"step-{step + 1}").mkdir()  # what a kill leaves
        (tmp_path / "checkpoints" / f"step-{step + 1}" / "rank-00000.safetensors").write_bytes(b"half")
    assert [each.step for each in checkpoints(tmp_path)] == [4, 10]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-4", "step-10", "step-11"}
    save(tmp_path, engine, 11)
    assert [each.step for each in checkpoints(tmp_path)] == [10, 11]
    assert load_checkpoint(Engine(), tmp_path, WORLD) == checkpoints(tmp_path)[-1]


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_used(tmp_path: Path, capsys, how: str) -> None:
    engine = Engine()
    for step in (1, 2):
        engine.train(range(step - 1, step))
        save(tmp_path, engine, step)
    file = tmp_path / "checkpoints" / "step-2" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content) if how == "flip" else content[:-1])
    if how == "remove":
        file.unlink()
    found = load_checkpoint(Engine(), tmp_path, WORLD)
    assert found is not None
    assert found.step == 1
    said = "".join(capsys.readouterr().err.replace("│", "").split())
    assert {"flip": "changedafter", "cut": "bytesandhad", "remove": "ismissing"}[how] in said
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-1", "damaged-step-2"}
    (tmp_path / "checkpoints" / "step-1" / "rank-00000.safetensors").unlink()
    with pytest.raises(UserError, match="no checkpoint is whole"):
        load_checkpoint(Engine(), tmp_path, WORLD)


def test_another_students_checkpoint_is_refused(tmp_path: Path) -> None:
    engine = Engine()
    engine.train(range(1))
    save(tmp_path, engine, 1)
    with pytest.raises(UserError, match=r"step-1: it is of another student, first in 0\.bias"):
        load_checkpoint(Engine(width=5), tmp_path, WORLD)


MANIFESTS = {
    "no JSON": (lambda kept: "{", "not valid JSON"),
    "no object": (lambda kept: "[1]", "not a JSON object"),
    "nested": (lambda kept: "[" * 100_000, "not valid JSON"),
    "another step": (lambda kept: kept.replace('"step": 2,', '"step": 6,'), "it is of step 6"),
    "no keys": (lambda kept: json.dumps({"format": 1}), "it has no step, or one of another type"),
    "other types": (lambda kept: json.dumps({"format": 1, "step": [2]}), "it has no step"),
}
"""What becomes of a manifest, and what is said of it."""


@pytest.mark.parametrize("how", MANIFESTS)
def test_a_damaged_manifest_is_a_damaged_checkpoint(tmp_path: Path, capsys, how: str) -> None:
    engine, (change, wrong) = Engine(), MANIFESTS[how]
    for step in (1, 2):
        engine.train(range(step - 1, step))
        save(tmp_path, engine, step)
    manifest = tmp_path / "checkpoints" / "step-2" / MANIFEST
    kept = manifest.read_text()
    manifest.write_text(change(kept))
    assert manifest.read_text() != kept
    found = load_checkpoint(Engine(), tmp_path, WORLD)
    assert found is not None
    assert found.step == 1
    said = "".join(capsys.readouterr().err.replace("│", "").split())
    assert f"{manifest}:{wrong}".replace(" ", "") in said
    assert "thecheckpointofstep2isdamagedandisnotused" in said
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-1", "damaged-step-2"}
    save(tmp_path, engine, 2)
    assert [each.step for each in checkpoints(tmp_path)] == [1, 2]


def test_a_checkpoint_of_another_format_is_one_sentence(tmp_path: Path) -> None:
    save(tmp_path, Engine(), 1)
    manifest = tmp_path / "checkpoints" / "step-1" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    with pytest.raises(UserError, match=r"step-1: a checkpoint of format 9, this version reads 1: finish the run with"):
        load_checkpoint(Engine(), tmp_path, WORLD)


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    engine = Engine()
    engine.train(range(1))
    for step in (1, 2, 3):
        save(tmp_path, engine, step)
    (tmp_path / "checkpoints" / "step-3" / MANIFEST).write_text("{")
    save(tmp_path, engine, 4)
    assert [each.step for each in checkpoints(tmp_path)] == [2, 4]


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path: Path) -> None:
    engine = Engine()
    engine.train(range(1))
    save(tmp_path, engine, 1)
    shutil.copytree(tmp_path / "checkpoints" / "step-1", tmp_path / "checkpoints" / "step-9")
    found = load_checkpoint(Engine(), tmp_path, WORLD)
    assert found is not None
    assert found.step == 1


def test_folders_of_other_names_are_the_users_own(tmp_path: Path) -> None:
    engine = Engine()
    engine.train(range(1))
    names = ("step-old", "step-1-backup", "step-٣", f"step-{'9' * 200}")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for step in (1, 2, 3):
        save(tmp_path, engine, step, keep=1)
    assert load_checkpoint(Engine(), tmp_path, WORLD) is not None
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*names, "step-3"}


def test_a_manifest_knows_the_log_of_its_step(tmp_path: Path) -> None:
    engine, log = Engine(), tmp_path / "metrics.jsonl"
    engine.train(range(1))
    log.write_text('{"step": 1}\n')
    save(tmp_path, engine, 1)
    entry = checkpoints(tmp_path)[0].manifest["log"]
    log.write_text('{"step": 1}\n{"step": 2}\n{"st')
    check_log(tmp_path, 1, entry)
    log.write_text('{"step": 7}\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl: its rows up to step 1 changed after they were written; put"):
        check_log(tmp_path, 1, entry)
    log.unlink()
    check_log(tmp_path, 1, entry)
