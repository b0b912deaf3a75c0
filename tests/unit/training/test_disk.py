"""What a run needs on the disk: counted from what such a run writes, and refused where it has no room."""

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import llmdistill
from llmdistill.cli import main as llmdistill_command
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.files import explain_refusal, new_folder, write_json
from llmdistill.generation.response_file import append_batch, parts_folder
from llmdistill.methods import METHODS
from llmdistill.tasks import instruction_scores
from llmdistill.train import main
from llmdistill.training.disk import DiskNeed, check_disk
from llmdistill.training.job import run_claimed
from llmdistill.training.log import RunLog
from llmdistill.training.plan import Plan, make_plans

SAMPLES = ("--method", "kd", "--kd.ratio", "1", "--data.on_policy", "0.5")


def make_plan(folder: Path, *arguments: str) -> Plan:
    words = ("--ds_config", "zero2", "--recipe", "quickstart", "--train.dtype", "fp32", "--output_dir", str(folder))
    return make_plans(parse_run([*words, *arguments], METHODS)[0])[-1]


def test_the_need_is_that_of_the_files_of_a_run(tmp_path: Path) -> None:
    """A student has 4 bytes for each parameter in fp32, a checkpoint 12: three are there while the third is written."""
    plan = make_plan(tmp_path)
    params = plan.models.sizes["student_params"]
    need = DiskNeed.of(plan)
    assert (need, need.total) == (
        DiskNeed(12 * params, 3, 4 * params, 1, 4 * params, 1),
        3 * 12 * params + 2 * 4 * params,
    )
    for arguments, checkpoints, students in (
        (("--train.save_every", "null", "--train.keep_best", "loss", "--data.valid", "embedded:valid"), 0, 4),
        (("--train.keep_checkpoints", "5"), 6, 2),
        (("--method", "none"), 0, 1),
        ((*SAMPLES, "--data.rollout.url", "http://nowhere"), 3, 3),
    ):
        need = DiskNeed.of(make_plan(tmp_path, *arguments))
        assert need.checkpoints == checkpoints
        assert need.students + need.trained_students == students


def test_a_run_without_room_is_refused_with_its_parts_before_it_scores(tmp_path: Path, monkeypatch) -> None:
    plan = make_plan(tmp_path / "new" / "run")
    total = DiskNeed.of(plan).total
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total))
    check_disk(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=total - 1))
    parts = r"output_dir .*: the run needs .* MB more there \(3 checkpoints of .* MB and 2 students of .* MB\)"
    data = None  # nothing of it is used before
    with pytest.raises(UserError, match=parts):
        run_claimed(plan, data)
    held = plan.folder / "checkpoints" / "step-2" / "rank-00000.safetensors"
    held.parent.mkdir(parents=True)
    held.write_bytes(b"\0")
    check_disk(plan)  # what an earlier start has written is not needed again
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    (plan.folder / "student").mkdir()
    check_disk(plan)  # and nothing is after the training


def test_a_place_where_no_folder_can_be_made_is_met_before_anything_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_, **__: pytest.fail("the ranks join"))
    monkeypatch.setattr(instruction_scores, "score_model", lambda *_, **__: pytest.fail("the model is loaded"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = ["--model", "embedded:teacher"]
    weighting = ["--student.factorize.weighting", "gradients", "--student.factorize.calibration.folder"]
    commands = {
        "--output_dir": ["train.py", "--ds_config", "zero2", "--output_dir"],
        weighting[-1]: ["train.py", "--ds_config", "zero2", "--output_dir", str(tmp_path / "run"), *weighting],
        "--output": ["evaluate", *model, "--data", "embedded:valid", "--output"],
        "--output_dir of a suite": ["evaluate", "--suite", "speed", *model, "--output_dir"],
        "--output_dir of tasks": ["evaluate", "--suite", "glue", *model, "--output_dir"],
    }
    for key, (name, *arguments) in commands.items():
        words = [*arguments, "/proc/x/y"]
        assert (main(words) if name == "train.py" else llmdistill_command([name, *words])) == 2, key
        said = capsys.readouterr().err  # of whose reasons one is there by user
        setting = key.partition(" ")[0]
        assert re.search(rf"error: {setting} /proc/x/y: no folder can be made in /proc \([a-z ]+\)", said), (key, said)
    assert main(["--ds_config", "zero2", "--output_dir", str(tmp_path / ("n" * 400))]) == 2
    assert "--output_dir has the name 'nnn" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"data has the name '../x'"):
        llmdistill.evaluate("embedded:teacher", {"../x": [{"instruction": "a", "output": "b"}]}, output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def student() -> None:
        with new_folder(tmp_path / "student") as partial:
            (partial / "model").write_text("half")

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write() raises it, without a name
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=full))
    for call, name in ((student, "student"), (lambda: write_json(tmp_path / "run.json", {}), "run.json")):
        with pytest.raises(UserError, match=r"B of .* are free on the disk at /") as caught:
            call()
        assert str(caught.value).startswith(f"{tmp_path / name}: no space left on device, ")
    assert not list(tmp_path.iterdir())


def test_a_file_that_may_not_grow_is_named_with_what_stays(tmp_path: Path) -> None:
    parts_folder(tmp_path / "a.jsonl").mkdir()
    log = RunLog(tmp_path, start=0, steps=1)
    calls: dict[str, Callable[[], None]] = {
        "a.jsonl.parts/rank-0.jsonl": lambda: append_batch(tmp_path / "a.jsonl.parts", 0, 1, {1: [2]}),
        "metrics.jsonl": lambda: log.add_figures(1, {"loss": 2.0}),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, call in calls.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))  # as by `ulimit -f`
        try:
            with pytest.raises(UserError) as caught:
                call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(caught.value).startswith(f"{tmp_path / name}: file too large: raise the limit (ulimit -f)")
        assert str(caught.value).endswith("; what is finished stays, and the same command goes on from there")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_what_a_library_says_of_the_disk_is_understood(tmp_path: Path, number: int) -> None:
    words = os.strerror(number)
    with pytest.raises(UserError, match=rf"/student: .*{words.lower()}"), new_folder(tmp_path / "student"):
        raise RuntimeError(f"Error while serializing: I/O error: {words} (os error {number})")
    assert explain_refusal(ValueError("other")) is None
