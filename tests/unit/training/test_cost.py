"""What a run says of its cost before it begins."""

import pytest
import torch

from llmdistill.config.command_line import parse_run
from llmdistill.methods import METHODS
from llmdistill.runtime import speed
from llmdistill.training.cost import estimate_cost, forecast
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
        f"{tokens:,} tokens of training at most, some {hours} h {minutes:02d} min on this machine; up to "
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
