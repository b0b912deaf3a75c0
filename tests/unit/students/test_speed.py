"""Whether a student's factors are slower than dense matrices: which products are timed, and what is said."""

import pytest
import torch
from tiny import random_student, tiny_config
from transformers import AutoModelForCausalLM

from llmdistill.students import speed


@pytest.mark.parametrize("settings", [
    {"rank": 5}, {"rank": 5, "form": "pivoted"}, {"shapes": {"*": "8x4"}, "sums": 2},
])  # fmt: skip
def test_each_factorized_linear_counts_once_against_a_dense_one(monkeypatch, settings):
    """With a clock that counts multiply-adds of dense linears, and parameters of factors."""
    student = random_student(AutoModelForCausalLM, tiny_config("llama"), settings)
    ran = []

    def run(modules, x):
        modules = list(modules)
        assert all(module(x).shape[-1] == module.out_features for module in modules)
        assert all(torch.isfinite(module(x)).all() for module in modules)
        ran.extend(modules)
        return sum(float(parameter.numel()) for module in modules for parameter in module.parameters())

    monkeypatch.setattr(speed, "_run", run)
    own, dense = speed.time_products(student.config)
    factors = [module for module in student.modules() if isinstance(module, speed.FactorizedLinear)]
    assert len(factors) == 14
    assert own == sum(parameter.numel() for module in factors for parameter in module.parameters())
    assert dense == sum(module.in_features * module.out_features for module in factors)
    assert not any(parameter.is_meta for module in ran for parameter in module.parameters())


def test_it_is_said_only_of_a_student_that_is_slower(monkeypatch):
    config = tiny_config("llama")
    assert speed.time_products(config) is None
    assert speed.describe_speed(config) is None
    monkeypatch.setattr(speed, "time_products", lambda *_: (2e-3, 3e-3))
    assert speed.describe_speed(config) is None
    monkeypatch.setattr(speed, "time_products", lambda *_: (3e-3, 2e-3))
    said = speed.describe_speed(config)
    assert said == "a token takes 3 ms by factors, 2 dense: see export --to dense"
    assert len(f"Speed       {said}") <= 80
    assert speed.describe_speed(tiny_config("bert")) is None, "an encoder writes no tokens"
