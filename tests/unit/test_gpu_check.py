"""gpu_check: what its parts compare, how their processes end, and what the report says of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gpu_check
import gpu_check_kernels
import gpu_check_parts
import gpu_check_waits
import pytest
import torch
from benching import said
from gpu_check_parts import PARTS, Part
from gpu_check_report import Report, Result, holds

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


def test_all_parts_together_take_less_than_nine_minutes():
    rows = [row for stage in gpu_check_parts.STAGES for row in stage]
    assert sorted(name for row in rows for name in row) == sorted(PARTS)
    stages = [max(sum(PARTS[name].seconds for name in row) for row in rows) for rows in gpu_check_parts.STAGES]
    assert sum(stages) + len(stages) * gpu_check.GRACE < 9 * 60


# What the parts compare


def test_losses_are_those_of_fp64_and_the_missing_kernels_are_named():
    why, *lines = gpu_check_kernels.kernels(gpu_check_kernels.SMALL, CPU)
    assert why == "Triton's kernels: no GPU; the losses in blocks stand for them"
    assert len(lines) == 30
    assert all(holds(line) for line in lines)
    assert all(line.value > 0 for line in lines), "a loss is compared with itself"


def test_a_wait_belongs_to_the_innermost_library():
    import deepspeed
    import transformers

    import llmdistill

    ours, theirs, other = (str(Path(str(each.__file__)).parent) for each in (llmdistill, deepspeed, transformers))
    step = (f"{ours}/run/trainer.py:train_step", f"{theirs}/runtime/engine.py:_take_model_step")
    norm = (*step, f"{theirs}/runtime/zero/stage_1_and_2.py:step", "/usr/lib/torch/_tensor.py:item")
    loss = (step[0], f"{ours}/losses/matrix.py:mse", "/usr/lib/torch/_tensor.py:item")
    mask = (step[0], f"{other}/masking_utils.py:mask")
    places = (norm, loss, mask, step[:1], ("/elsewhere/llmdistill/scripts/x.py:main",))
    found = [gpu_check_waits.origin(place) for place in places]
    assert found == ["deepspeed", "llmdistill/losses", "transformers", "llmdistill", None]
    assert [gpu_check_waits.is_norm(place) for place in (norm, step, norm[2:], loss)] == [True, True, False, False]
    assert gpu_check_waits.shown(loss) == "llmdistill/losses/matrix.py:mse"


# Processes and results


def tells(value: float | None) -> str:
    return f"print({said({'measure': 'm', 'value': value, 'target': 1.0, 'detail': 'd'})!r}, flush=True)\n"


def leaves_out(text: str) -> str:
    return f"print({said({'left_out': text})!r})\n"


PROGRAMS = {
    "good": tells(0.5) + leaves_out("the other half"),
    "over": tells(1.5),
    "spoiled": tells(None),
    "broken": tells(0.5) + "raise ValueError('out of luck')",
    "slow": tells(0.5) + "import subprocess; subprocess.run(['sleep', '60'])",
    "idle": leaves_out("all of it"),
}


@pytest.fixture
def small_parts(monkeypatch):
    """Parts that take no time to speak of, in the place of the real ones."""

    def command(name: str, *_: object) -> list[str]:
        return [sys.executable, "-c", PROGRAMS[name]]

    parts = {name: Part(about="about", look=lambda _: iter(()), seconds=60) for name in PROGRAMS}
    parts["slow"] = Part(about="about", look=lambda _: iter(()), seconds=1)
    parts["absent"] = Part(about="about", look=lambda _: iter(()), seconds=60, needs=("torch", "no_such_module"))
    parts["on a GPU"] = Part(about="about", look=lambda _: iter(()), seconds=60, gpu_only=True)
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    monkeypatch.setattr(gpu_check, "STAGES", ((("slow", "good"), ("over", "spoiled", "broken")), (tuple(parts)[5:],)))
    monkeypatch.setattr(gpu_check, "part_command", command)
    return parts


def test_no_part_stops_another_and_each_is_reported(small_parts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "GRACE", 1.0)
    report = Report(tmp_path, "the | command", "cpu", 1, list(small_parts))
    gpu_check.Runner("cpu", 1, patience=1.0).run_stages(list(small_parts), report)
    states = {name: (result.state, result.why) for name, result in report.results.items()}
    assert states == {
        "slow": ("out of time", "it was ended after 1 s"),
        "good": ("ok", ""),
        "over": ("failed", "1 over the limit: m"),
        "spoiled": ("failed", "1 over the limit: m"),
        "broken": ("failed", "exit code 1: ValueError: out of luck"),
        "idle": ("left out", "all of it"),
        "absent": ("left out", "no_such_module not installed"),
        "on a GPU": ("left out", "there is no GPU"),
    }
    assert [name for name, result in report.results.items() if result.failed] == ["slow", "over", "spoiled", "broken"]
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: part["state"] for name, part in written["parts"].items()} == {k: v[0] for k, v in states.items()}
    assert written["parts"]["slow"]["lines"][0]["value"] == 0.5, "what it had told before its end is lost"
    assert written["parts"]["spoiled"]["lines"][0] == {
        **{"measure": "m", "value": None, "target": 1.0, "detail": "d", "unit": "", "at_least": False},
        "holds": False,
    }
    assert "ValueError: out of luck" in written["parts"]["broken"]["log"]
    assert written["versions"]["torch"] == torch.__version__
    page = (tmp_path / "gpu_check.md").read_text()
    assert "| good | m | 0.5 | ≤ 1 | ok | d |\n| good | left out: the other half | – |  |  |  |" in page
    assert "| over | m | 1.5 | ≤ 1 | **no** | d |" in page
    assert "| absent | left out: no_such_module not installed | – |  |  |  |" in page
    assert "**Warning: broken: failed: exit code 1: ValueError: out of luck**" in page
    assert "There is no GPU here" in page
    assert "over the limit: m" in capsys.readouterr().out


def test_a_part_gets_the_time_that_the_one_before_it_leaves(small_parts, tmp_path, monkeypatch):
    limits = {}

    def run(self: object, name: str, limit: float) -> Result:
        limits[name] = limit
        return Result("ok", "about", seconds={"over": 50.0, "spoiled": 500.0}.get(name, 1.0))

    monkeypatch.setattr(gpu_check.Runner, "run", run)
    report = Report(tmp_path, "command", "cpu", 1, list(small_parts))
    gpu_check.Runner("cpu", 1, patience=2.0).run_stages(["over", "spoiled", "broken"], report)
    assert limits == {"over": 120.0, "spoiled": 120.0 - 50.0 + 120.0, "broken": 120.0}
