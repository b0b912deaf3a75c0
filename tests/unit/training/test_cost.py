"""What a run says of its cost before it begins."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import llmdistill
from llmdistill.config.command_line import parse_run
from llmdistill.methods import METHODS
from llmdistill.progress import duration
from llmdistill.runtime import speed
from llmdistill.students.start import measure
from llmdistill.training import cost
from llmdistill.training.cost import estimate_cost, forecast, start_flops
from llmdistill.training.plan import make_plan

CPU = torch.device("cpu")


def plan_of(*words):
    return make_plan(parse_run(["--ds_config", "zero2", "--recipe", "quickstart", *words], METHODS)[0])


def test_a_long_run_says_what_it_takes(monkeypatch):
    monkeypatch.setattr(speed, "measure_cpu", lambda: {"tflops": 0.1, "random": torch.rand(1)})
    plan = plan_of("--train.steps", "100000")
    state = torch.get_rng_state()
    said = forecast(plan, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    tokens = 100_000 * 32 * 160
    student, teacher = plan.models.sizes["student_params"], 1_220_224
    # Two FLOP for a parameter and token of the teacher, at 60 % of 0.1 TFLOP/s; three passes of the student.
    seconds = tokens * (2 * teacher + 3 * plan.models.sizes["forward_flops"]) / (0.6 * 0.1e12)
    hours, minutes = divmod(round(seconds / 60), 60)
    assert said.startswith(
        f"{tokens:,} tokens of training at most, some {hours} h {minutes:02d} min on this machine after 9 s for the "
        "start; up to "
    )
    held = student * (4 + 4 + 12) + teacher * 4
    assert f"up to {held / 1e6:.1f} MB for weights" in said


@pytest.mark.parametrize("words", [[], ["--method", "none"]], ids=str)
def test_a_short_run_says_nothing(words, monkeypatch):
    monkeypatch.setattr(speed, "measure_cpu", lambda: pytest.fail("a second for nothing"))
    plan = plan_of(*words)
    assert forecast(plan, CPU) is None
    assert estimate_cost(plan)["flops"] < 1e13


def test_a_longer_run_says_something_where_it_takes_minutes(monkeypatch):
    plan = plan_of("--train.steps", "1000")
    for tflops, says in ((1.0, False), (0.01, True)):
        monkeypatch.setattr(speed, "measure_cpu", lambda tflops=tflops: {"tflops": tflops})
        assert (forecast(plan, CPU) is not None) == says


@pytest.mark.parametrize("allocation", ["loss", "uniform"])
def test_the_start_costs_what_torch_counts_and_at_most_twice_that(allocation, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "_DECOMPOSITION", 0)  # which torch does not count
    for module in (cost, measure):
        monkeypatch.setattr(module, "LOSS_EXAMPLES", 8)
    row = {"instruction": "Name them.", "output": "Paris Rome " * 40}  # longer than any limit
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 16)
    limits = {"max_prompt_length": 64, "max_length": 96}
    start = {"target_params": "34%", "weighting": "gradients", "allocation": allocation}
    calibration = {"data": str(tmp_path / "rows.jsonl"), "examples": 16, "held_out": 0}
    words = [word for name, value in start.items() for word in (f"--student.factorize.{name}", value)]
    words += [
        word for name, value in calibration.items() for word in (f"--student.factorize.calibration.{name}", str(value))
    ]
    words += [word for name, value in limits.items() for word in (f"--data.{name}", str(value))]
    with FlopCounterMode(display=False) as counter:
        llmdistill.compress("embedded:teacher", **start, calibration=calibration, **limits)
    assert 1 < start_flops(plan_of(*words)) / counter.get_total_flops() < 2


def test_a_long_start_is_told_beside_the_training(monkeypatch):
    monkeypatch.setattr(speed, "measure_cpu", lambda: {"tflops": 0.01})
    start = ["--student.factorize.weighting", "gradients", "--student.factorize.calibration.examples", "40000"]
    said = forecast(plan_of("--train.steps", "1000", *start), CPU)
    whole = start_flops(plan_of("--train.steps", "1000", *start)) / (0.6 * 0.01e12)
    assert f"on this machine after {duration(whole)} for the start; " in said
    assert said.endswith("The scores come on top")
    assert start_flops(plan_of("--student.factorize.weighting", "none")) == 0
