"""The bench of starts: the rival's ranks against a plain loop, and the figure."""

from __future__ import annotations

import math
import random

import pytest
import torch
from bench_starts import zero_sum_ranks

from llmdistill.factorize.weighted import WeightedSVD

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(5))
def test_zero_sum_ranks_are_those_of_a_plain_search(seed):
    shapes = {"a": (6, 10), "b": (8, 8), "c": (12, 5)}
    torch.manual_seed(seed)
    values = {name: torch.rand(min(shape)).sort(descending=True).values for name, shape in shapes.items()}
    slopes = {name: torch.randn(min(shape)) for name, shape in shapes.items()}
    empty = torch.zeros(0)
    factors = {
        name: WeightedSVD(left=empty, values=each, right=empty, energy=0.0, scale=1.0) for name, each in values.items()
    }
    budget = random.Random(seed).randint(60, 150)

    ranks, running = {name: min(shape) for name, shape in shapes.items()}, 0.0

    def params():
        return sum(min(ranks[name] * (m + n), m * n) for name, (m, n) in shapes.items())

    while params() > budget:
        offers = [(float(-values[n][r - 1] * slopes[n][r - 1]), n) for n, r in ranks.items() if r > 1]
        wanted = [each for each in offers if (each[0] > 0) == (running <= 0)] or offers
        change, name = min(wanted, key=lambda each: abs(each[0]))
        running += change
        ranks[name] -= 1
    kept = {name: rank for name, rank in ranks.items() if rank * sum(shapes[name]) < math.prod(shapes[name])}
    assert zero_sum_ranks(factors, slopes, shapes, budget) == kept
