"""What a run needs on the disk: counted from what such a run writes, and refused where it has no room."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.run.disk import DiskNeed, check_disk
from llmdistill.run.job import execute
from llmdistill.run.plan import Plan, make_plans
from llmdistill.runtime.distributed import World

Usage = namedtuple("Usage", "total used free")


def make_plan(folder: Path, *arguments: str) -> Plan:
    words = ("--ds_config", "zero2", "--recipe", "quickstart", "--train.dtype", "fp32", "--output_dir", str(folder))
    return make_plans(parse_run([*words, *arguments], METHODS)[0])[-1]


def test_the_need_is_that_of_the_files_of_a_run(tmp_path: Path) -> None:
    """A student has 4 bytes for each parameter in fp32, a checkpoint 12: three are there while the third is written."""
    plan = make_plan(tmp_path)
    params = plan.models.sizes["student_params"]
    assert DiskNeed.of(plan) == DiskNeed(12 * params, 3, 4 * params, 2)
    assert DiskNeed.of(plan).total == 3 * 12 * params + 2 * 4 * params


@pytest.mark.parametrize(
    ("arguments", "checkpoints", "students"),
    [
        (("--train.save_every", "null"), 0, 2),
        (("--train.keep_checkpoints", "5"), 6, 2),
        (("--train.keep_best", "loss", "--data.valid", "embedded:valid"), 3, 4),
        (("--method", "none"), 0, 1),
    ],
)
def test_settings_change_the_need(tmp_path: Path, arguments, checkpoints: int, students: int) -> None:
    need = DiskNeed.of(make_plan(tmp_path, *arguments))
    assert (need.checkpoints if need.checkpoint else 0, need.students) == (checkpoints, students)


def test_a_run_without_room_is_refused_with_its_parts(tmp_path: Path, monkeypatch) -> None:
    plan = make_plan(tmp_path / "new" / "run")
    total = DiskNeed.of(plan).total
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, total))
    check_disk(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, total - 1))
    with pytest.raises(UserError, match=r"needs .* MB more there \(3 checkpoints of .* MB and 2 students of .* MB\)"):
        check_disk(plan)
    held = plan.folder / "checkpoints" / "step-2" / "rank-00000.safetensors"
    held.parent.mkdir(parents=True)
    held.write_bytes(b"\0")
    check_disk(plan)  # what an earlier start has written is not needed again


def test_the_main_job_looks_before_it_scores_and_not_again_after_the_training(tmp_path: Path, monkeypatch) -> None:
    plan = make_plan(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    data: Any = None  # nothing of it is used before
    with pytest.raises(UserError, match=r"output_dir .*: the run needs"):
        execute(plan, data, World.alone())
    (tmp_path / "student").mkdir()
    check_disk(plan)
