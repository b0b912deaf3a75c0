"""gpu_check: what its parts compare and find on gloo ranks, how their processes end, and what the report says."""

import json
import sys
from dataclasses import asdict
from math import nan

import gpu_check
import gpu_check_kernels
import gpu_check_training
import pytest
import torch
from benching import Line
from gpu_check import Part, holds

from llmdistill.runtime.distributed import World

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("tier", "minutes"), [("quick", 4), ("all", 15)])
def test_the_parts_of_a_tier_together_keep_its_time(tier, minutes):
    parts = [gpu_check.PARTS[name] for name in gpu_check.TIERS[tier]]
    assert sum(part.seconds for part in parts) <= minutes * 60


def test_other_programs_are_named_before_the_first_part_and_on_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "run_part", lambda *_: gpu_check.Result("ok"))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for load, busy in ((7.0, True), (1.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        gpu_check.check(tmp_path, ["zero"], "the command", gpus=0)
        said = "a load of 7.0 on 4 cores"
        assert (said in capsys.readouterr().out.splitlines()[0]) == busy
        assert (said in (tmp_path / "gpu_check.md").read_text()) == busy


def test_a_part_has_the_time_that_the_others_left(tmp_path, monkeypatch):
    clock = iter([0.0, 0.0, 50.0, 50.0, 170.0, 170.0, 225.0, 230.0, 240.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    given = []
    monkeypatch.setattr(gpu_check, "run_part", lambda *asked: given.append(asked[3]) or gpu_check.Result("ok"))
    gpu_check.check(tmp_path, gpu_check.TIERS["quick"], "the command", 1, 240.0)
    assert given == [240.0, 190.0, 70.0, 10.0]
    monkeypatch.undo()
    late = gpu_check.run_part("zero", 1, tmp_path / "zero.log", 10.0)
    assert (late.state, late.why) == ("left out", "the parts before it took all the time")


def test_losses_are_those_of_fp64_and_the_missing_kernels_are_named():
    why, *lines = gpu_check_kernels.kernels(World(rank=0, size=1, device=torch.device("cpu")))
    assert why.measure == "Triton's kernels: no GPU; the losses in blocks stand for them"
    assert len(lines) == 30
    assert all(holds(line) for line in lines)
    assert all(line.value > 0 for line in lines), "a loss is compared with itself"


def test_a_wait_belongs_to_the_innermost_library():
    step = ("llmdistill.training.trainer:train_step", "deepspeed.runtime.engine:_take_model_step")
    norm = (*step, "deepspeed.runtime.zero.stage_1_and_2:step", "torch._tensor:item")
    loss = (step[0], "llmdistill.losses.matrix:mse", "torch._tensor:item")
    mask = (step[0], "transformers.masking_utils:mask")
    places = (norm, loss, mask, step[:1], ("__main__:main", "llmdistill_of_mine:item"))
    found = [gpu_check_training.origin(place)[0] for place in places]
    assert found == ["deepspeed", "llmdistill.losses", "transformers", "llmdistill", None]
    assert [gpu_check_training.is_norm(place) for place in (norm, step, norm[2:], loss)] == [True, True, False, False]
    assert gpu_check_training.origin(loss)[1] == "llmdistill.losses.matrix:mse"


def tells(value: float) -> str:
    line = json.dumps(asdict(Line("m", value, 1.0, "d"))) + "\n"
    return f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({line!r})\n"


PROGRAMS = {
    "good": tells(0.5),
    "over": tells(1.5),
    "spoiled": tells(nan),
    "broken": tells(0.5) + "raise ValueError('out of luck')",
    "slow": tells(0.5) + "import subprocess; subprocess.run(['sleep', '60'])",
    "idle": "",
}


def test_no_part_stops_another_and_each_is_reported(tmp_path, monkeypatch):
    parts = {name: Part("about", "no_module", 60) for name in PROGRAMS}
    parts["slow"] = Part("about", "no_module", 3)
    parts["on a GPU"] = Part("about", "no_module", 60, gpu_only=True)
    parts["absent"] = Part("about", "no_module", 60, all_gpus=True)
    there = gpu_check.find_spec
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name == "deepspeed" else there(name))
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "part_command", lambda name, _, told: [sys.executable, "-c", PROGRAMS[name], told])
    monkeypatch.setattr(gpu_check, "PATIENCE", 0.5)
    monkeypatch.setattr(gpu_check, "GRACE", 1.0)
    results = gpu_check.check(tmp_path, list(parts), "the | command", gpus=0)
    assert {name: (result.state, result.why) for name, result in results.items()} == {
        "slow": ("failed", "it was ended after 3 s"),
        "good": ("ok", ""),
        "over": ("failed", "1 over the limit: m"),
        "spoiled": ("failed", "1 over the limit: m"),
        "broken": ("failed", "exit code 1: ValueError: out of luck"),
        "idle": ("failed", "it measured nothing"),
        "absent": ("left out", "deepspeed is not installed"),
        "on a GPU": ("left out", "there is no GPU"),
    }
    assert results["slow"].lines[0].value == 0.5, "what it had told before its end is lost"
    assert "ValueError: out of luck" in (tmp_path / "broken.log").read_text()
    page = (tmp_path / "gpu_check.md").read_text()
    for said in (
        "| good | m | 0.5 | ≤ 1 | ok | d |",
        "| spoiled | m | – | ≤ 1 | no | d |",
        "| absent | left out: deepspeed is not installed | – |  |  |  |",
        "**Warning: broken: failed: exit code 1: ValueError: out of luck**",
    ):
        assert said in page


@pytest.fixture
def look(rank_server, tmp_path):
    """The lines of a part, by the names of their measures."""

    def run(part: str, *, ranks: int = 1) -> dict[str, Line]:
        told = tmp_path / f"{part}.jsonl"
        words = ["--part", part, "--told", str(told)]
        done = rank_server.run(words, ranks=ranks, program="scripts/gpu_check/gpu_check.py")
        assert done.returncode == 0, done.stderr
        lines = [Line(**json.loads(line)) for line in told.read_text().splitlines()]
        assert len(lines) == len({line.measure for line in lines}), "only one rank tells"
        assert not [line for line in lines if not holds(line)]
        return {line.measure: line for line in lines}

    return run


def test_each_part_finds_what_it_looks_for(look):
    lines = look("zero", ranks=2)
    assert all(line.value < 1e-6 for name, line in lines.items() if "in fp32" in name)
    # bf16 is rounded, so that a difference of nothing would be that of two runs in fp32.
    assert all(line.value > 1e-4 for name, line in lines.items() if "in bf16" in name)
    assert len(lines) == 7
    lines = look("waits")
    assert len(lines) == 3
    assert all("look at the norm 0" not in line.detail for line in lines.values())
    assert all("elsewhere in DeepSpeed 0" in line.detail for line in lines.values()), "only DeepSpeed waits"
    assert len(look("memory")) == 2
