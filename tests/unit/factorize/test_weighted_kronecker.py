"""Weighted Kronecker products against a naive fp64 version that builds every matrix."""

from __future__ import annotations

import pytest
import torch

from llmdistill.errors import UserError
from llmdistill.factorize import weighted_kronecker as module
from llmdistill.factorize.kronecker import KroneckerShape, nearest_kronecker
from llmdistill.factorize.moments import Moments
from llmdistill.factorize.weighted import GRADIENT_DAMPING, INPUT_DAMPING
from llmdistill.factorize.weighted_kronecker import WeightedKronecker, weighted_kronecker

TOKENS = 200
SHAPES = [((12, 8), KroneckerShape(3, 4, 2)), ((8, 12), KroneckerShape(4, 2, 3)), ((6, 10), KroneckerShape(6, 1, 1))]


def second_moment(side: int) -> torch.Tensor:
    rows = torch.randn(TOKENS, side) @ torch.randn(side, side)
    return rows.T @ rows


def made(m: int, n: int, *, gradients: bool = True) -> Moments:
    return Moments(inputs=second_moment(n), gradients=second_moment(m) if gradients else None, tokens=TOKENS)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return sum((torch.kron(x, y) for x, y in zip(a.double(), b.double(), strict=True)), torch.zeros(()).double())


def metric(moments: Moments, m: int) -> torch.Tensor:
    """G ⊗ C (mn, mn), with the damping of the weighted SVD."""

    def damped(moment: torch.Tensor, share: float) -> torch.Tensor:
        exact = moment.double()
        return exact + share * exact.trace() / len(exact) * torch.eye(len(exact))

    outputs = torch.eye(m).double() if moments.gradients is None else damped(moments.gradients, GRADIENT_DAMPING)
    return torch.kron(outputs, damped(moments.inputs, INPUT_DAMPING))


def naive_cost(weight: torch.Tensor, approximation: torch.Tensor, moments: Moments) -> float:
    error = (weight.double() - approximation).flatten()
    power = 1 if moments.gradients is None else 2
    return float(error @ metric(moments, len(weight)) @ error) / 2 / TOKENS**power


def naive_factors(weight: torch.Tensor, moments: Moments, shape: KroneckerShape, rounds: int) -> float:
    """The cost after exact alternating least squares whose normal equations are built entry by entry."""
    full = metric(moments, len(weight))
    a, b = (each.clone() for each in nearest_kronecker(weight.double(), shape))
    for _ in range(rounds):
        for mine in (a, b):
            columns = []
            for number in range(mine.numel()):
                unit = torch.zeros(mine.numel(), dtype=torch.float64)
                unit[number] = 1
                unit = unit.reshape(mine.shape)
                columns.append((product(unit, b) if mine is a else product(a, unit)).flatten())
            basis = torch.stack(columns, dim=1)
            found = torch.linalg.lstsq(basis.T @ full @ basis, basis.T @ full @ weight.double().flatten())
            mine.copy_(found.solution.reshape(mine.shape))
    return naive_cost(weight, product(a, b), moments)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("size", "shape"), SHAPES)
def test_it_is_as_good_as_exact_alternating_least_squares(size, shape, gradients, monkeypatch) -> None:
    weight, moments = torch.randn(size), made(*size, gradients=gradients)
    monkeypatch.setattr(module, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(module, "ROUNDS", 40)
    found = weighted_kronecker(weight, moments, shape)
    own = naive_cost(weight, product(found.a, found.b), moments)
    assert own == pytest.approx(found.cost, rel=1e-4)
    assert own <= 1.1 * naive_factors(weight, moments, shape, rounds=15)
    unweighted = naive_cost(weight, product(*nearest_kronecker(weight, shape)), moments)
    assert own < 0.95 * unweighted


def test_moments_that_are_products_need_no_round(monkeypatch) -> None:
    """Then whitening gives the optimum, which no exact alternation improves."""
    weight, shape = torch.randn(12, 8), KroneckerShape(3, 4, 2)
    sides = [second_moment(side) for side in (3, 4, 4, 2)]
    moments = Moments(inputs=torch.kron(*sides[2:]), gradients=torch.kron(*sides[:2]), tokens=TOKENS)
    monkeypatch.setattr(module, "ROUNDS", 0)
    own = weighted_kronecker(weight, moments, shape).cost
    assert own == pytest.approx(naive_factors(weight, moments, shape, rounds=20), rel=0.02)


def test_the_two_factors_of_a_product_have_the_same_norm() -> None:
    a, b = torch.randn(2, 3, 4), 7 * torch.randn(2, 4, 2)
    values = WeightedKronecker(a=a, b=b, cost=0.0, tokens=1).parameters(KroneckerShape(3, 4, 2), "left")
    torch.testing.assert_close(product(values["A"], values["B"]), product(a, b), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values["A"].flatten(1).norm(dim=1), values["B"].flatten(1).norm(dim=1))


def test_data_without_inputs_are_refused() -> None:
    empty = Moments(inputs=torch.zeros(8, 8), gradients=None, tokens=3)
    with pytest.raises(UserError, match="no input or no gradient at all"):
        weighted_kronecker(torch.randn(12, 8), empty, KroneckerShape(3, 4))
