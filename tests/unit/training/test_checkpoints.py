"""The checkpoints of a run's folder, with an engine without ZeRO; tests/dist has its stages and ranks."""

import json

import pytest
import torch
from hostile import refuses
from plain_engine import PlainEngine
from torch import nn

from llmdistill.artifacts import MANIFEST
from llmdistill.training.checkpoints import checkpoints, load_checkpoint, save_checkpoint
from llmdistill.training.log import check_log

pytestmark = pytest.mark.usefixtures("cpu_world")


class Engine(PlainEngine):
    """A small model, part of it frozen, that learns a number at each step."""

    def __init__(self, width: int = 4) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
        module[1].bias.requires_grad_(False)
        super().__init__(module, accumulation=2)

    def learn(self, steps: range) -> None:
        for step in steps:
            self.module(torch.full((2, 3), step + 1.0)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [each.clone() for each in (*self.module.parameters(), *moments)]


def save(folder, engine: Engine, *steps: int, keep: int = 2) -> None:
    """Save checkpoints of an engine, which learns a step before each."""
    for step in steps:
        engine.learn(range(step - 1, step))
        save_checkpoint(engine, folder, step, keep)


def test_a_restored_engine_goes_on_as_the_one_that_was_saved(tmp_path) -> None:
    first, second = Engine(), Engine()
    assert load_checkpoint(second, tmp_path) is None
    first.learn(range(4))
    first.skipped_steps = 2
    save(tmp_path, first, 5)
    found = load_checkpoint(second, tmp_path)
    assert (found.step, second.global_steps, second.micro_steps, second.global_samples) == (5, 5, 10, 40)
    assert second.skipped_steps == 2
    for engine in (first, second):
        engine.learn(range(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))


def test_only_complete_checkpoints_count_and_the_newest_stay(tmp_path) -> None:
    engine = Engine()
    for step in (2, 4, 10):
        save(tmp_path, engine, step)
        (tmp_path / "checkpoints" / f"step-{step + 1}").mkdir()  # what a kill leaves
        (tmp_path / "checkpoints" / f"step-{step + 1}" / "rank-00000.safetensors").write_bytes(b"half")
    assert [each.step for each in checkpoints(tmp_path)] == [4, 10]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-4", "step-10", "step-11"}
    save(tmp_path, engine, 11)
    assert [each.step for each in checkpoints(tmp_path)] == [10, 11]
    assert load_checkpoint(Engine(), tmp_path) == checkpoints(tmp_path)[-1]
    # A damaged one does not count among those that are kept.
    (tmp_path / "checkpoints" / "step-11" / MANIFEST).write_text("{")
    save(tmp_path, engine, 12)
    assert [each.step for each in checkpoints(tmp_path)] == [10, 12]


DAMAGES = {
    "flip": ("rank-00000.safetensors", lambda kept: kept[:-1] + bytes([kept[-1] ^ 1]), "changedafter"),
    "another step": (MANIFEST, lambda kept: kept.replace(b'"step": 2,', b'"step": 6,'), "manifest.json:itisofstep6"),
    "no keys": (MANIFEST, lambda kept: b'{"format": 1}', "manifest.json:ithasnostep,oroneofanothertype"),
}
"""What becomes of which file, and what is said of it."""


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_it_used(tmp_path, capsys, how: str) -> None:
    engine, (name, change, wrong) = Engine(), DAMAGES[how]
    save(tmp_path, engine, 1, 2)
    file = tmp_path / "checkpoints" / "step-2" / name
    kept = file.read_bytes()
    assert change(kept) != kept
    file.write_bytes(change(kept))
    found = load_checkpoint(Engine(), tmp_path)
    assert found.step == 1
    said = "".join(capsys.readouterr().err.replace("│", "").split())
    assert wrong in said
    assert "thecheckpointofstep2isdamagedandisnotused" in said
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-1", "damaged-step-2"}
    save(tmp_path, engine, 2)
    assert [each.step for each in checkpoints(tmp_path)] == [1, 2]
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step}" / "rank-00000.safetensors").unlink()
    refuses("no checkpoint is whole", load_checkpoint, Engine(), tmp_path)


def test_a_checkpoint_of_another_student_or_format_is_refused(tmp_path) -> None:
    save(tmp_path, Engine(), 1)
    refuses("step-1: it is of another student, first in 0.bias", load_checkpoint, Engine(width=5), tmp_path)
    manifest = tmp_path / "checkpoints" / "step-1" / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 9}))
    said = "step-1: a checkpoint of format 9, this version reads 1: finish the run with"
    refuses(said, load_checkpoint, Engine(), tmp_path)


def test_folders_of_other_names_are_the_users_own(tmp_path) -> None:
    names = ("step-old", "step-1-backup", "step-٣", f"step-{'9' * 200}")
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    save(tmp_path, Engine(), 1, 2, 3, keep=1)
    assert load_checkpoint(Engine(), tmp_path) is not None
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*names, "step-3"}


def test_a_manifest_knows_the_log_of_its_step(tmp_path) -> None:
    engine, log = Engine(), tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n')
    save(tmp_path, engine, 1)
    entry = checkpoints(tmp_path)[0].manifest["log"]
    log.write_text('{"step": 1}\n{"step": 2}\n{"st')
    check_log(tmp_path, 1, entry)
    check_log(tmp_path, 1, {**entry, "sha256": "of an earlier version"})
    log.write_text('{"step"')
    said = "metrics.jsonl: it lacks rows up to step 1, which it had; put"
    refuses(said, check_log, tmp_path, 1, entry)
