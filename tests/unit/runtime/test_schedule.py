"""The learning rate against transformers' schedules."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from llmdistill.config import TrainConfig
from llmdistill.runtime.engine import learning_rate


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_is_that_of_transformers(schedule):
    settings = TrainConfig(steps=20, warmup_steps=5, learning_rate=0.3, schedule=schedule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    reference = get_scheduler(schedule, optimizer, num_warmup_steps=5, num_training_steps=20)
    rates = []
    for _ in range(20):
        rates.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    # transformers starts its warm-up at 0, a step that learns nothing; ours at 1/warmup.
    assert [learning_rate(settings, step) for step in range(5, 20)] == pytest.approx(rates[5:])
    assert [learning_rate(settings, step) for step in range(4)] == pytest.approx(rates[1:5])


def test_constant_and_minimum():
    constant = TrainConfig(steps=10, learning_rate=0.2, schedule="constant")
    assert {learning_rate(constant, step) for step in range(10)} == {0.2}
    floor = TrainConfig(steps=10, learning_rate=0.2, min_learning_rate=0.1)
    rates = [learning_rate(floor, step) for step in range(10)]
    assert rates == sorted(rates, reverse=True)
    assert (rates[0], rates[-1] > 0.1) == (0.2, True)
