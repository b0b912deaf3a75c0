"""Weighted factorization against naive fp64 versions, gradient descent, and every allocation of a small case."""

from __future__ import annotations

import itertools

import pytest
import torch

from llmdistill.errors import UserError
from llmdistill.factorize.forms import largest_rank
from llmdistill.factorize.moments import Moments
from llmdistill.factorize.weighted import Weighted, WeightedSVD, allocate, weighted_svd


def make_moments(m: int, n: int, rows: int = 200, *, gradients: bool = True, scale: torch.Tensor | None = None):
    inputs = torch.randn(rows, n, dtype=torch.float64) @ torch.randn(n, n, dtype=torch.float64)
    inputs = inputs if scale is None else inputs * scale
    outputs = torch.randn(rows, m, dtype=torch.float64) @ torch.randn(m, m, dtype=torch.float64)
    return Moments(inputs=inputs.T @ inputs, gradients=outputs.T @ outputs if gradients else None, tokens=rows), inputs


def product(factors: WeightedSVD, rank: int) -> torch.Tensor:
    return ((factors.left[:, :rank] * factors.values[:rank]) @ factors.right[:rank]).double()


def naive_cost(weight: torch.Tensor, approximation: torch.Tensor, moments: Moments) -> float:
    """½ tr(ΔᵀGΔC) / tokens², by the definition; without G half the squared error of the outputs per token."""
    change = weight.double() - approximation
    outer = torch.eye(len(weight), dtype=torch.float64) if moments.gradients is None else moments.gradients
    divisor = 2 * moments.tokens ** (1 if moments.gradients is None else 2)
    return float(torch.trace(change.T @ outer @ change @ moments.inputs)) / divisor


@pytest.mark.parametrize(("gradients", "m", "n"), [(True, 12, 20), (False, 20, 12)])
def test_no_gradient_descent_finds_a_better_product(gradients, m, n):
    weight, (moments, _) = torch.randn(m, n), make_moments(m, n, gradients=gradients)
    rank = 4
    own = naive_cost(weight, product(weighted_svd(weight, moments, min(m, n)), rank), moments)
    a = torch.randn(m, rank, dtype=torch.float64, requires_grad=True)
    b = torch.randn(rank, n, dtype=torch.float64, requires_grad=True)
    outer = torch.eye(m, dtype=torch.float64) if moments.gradients is None else moments.gradients
    optimizer = torch.optim.LBFGS([a, b], max_iter=400, line_search_fn="strong_wolfe", tolerance_change=0)

    def loss():
        optimizer.zero_grad()
        change = weight.double() - a @ b
        value = torch.trace(change.T @ outer @ change @ moments.inputs)
        value.backward()
        return value

    optimizer.step(loss)
    found = naive_cost(weight, (a @ b).detach(), moments)
    assert own <= found * (1 + 1e-3)
    plain = torch.linalg.svd(weight.double())
    unweighted = (plain.U[:, :rank] * plain.S[:rank]) @ plain.Vh[:rank]
    assert own < 0.9 * naive_cost(weight, unweighted, moments)


@pytest.mark.parametrize("gradients", [True, False])
def test_the_predicted_cost_is_that_of_the_product(gradients):
    weight, (moments, _) = torch.randn(16, 10), make_moments(16, 10, gradients=gradients)
    factors = weighted_svd(weight, moments, 10)
    for rank, cost in enumerate(factors.costs()):
        assert cost == pytest.approx(naive_cost(weight, product(factors, rank), moments), rel=2e-2, abs=1e-3)
    assert factors.costs()[10] == pytest.approx(0.0, abs=1e-6 * factors.costs()[0])


@pytest.mark.parametrize("points", [6, 32])
def test_spectra_are_points_of_the_costs_from_rank_0_to_the_last(points):
    weight, (moments, _) = torch.randn(24, 20), make_moments(24, 20)
    factors = weighted_svd(weight, moments, 20)
    spectra = Weighted(ranks={}, factors={"a": factors}, predicted_loss=0.0).spectra(points)
    ranks = [rank for rank, _ in spectra["a"]["costs"]]
    assert spectra["a"]["shape"] == [24, 20]
    assert [cost for _, cost in spectra["a"]["costs"]] == [factors.costs()[rank] for rank in ranks]
    assert (ranks[0], ranks[-1]) == (0, 20)
    assert ranks == sorted(set(ranks))
    assert len(ranks) <= points


def test_inputs_that_are_never_there_are_damped_not_divided_by():
    weight, (moments, inputs) = torch.randn(6, 8), make_moments(6, 8)
    inputs[:, 5] = 0
    moments = Moments(inputs=inputs.T @ inputs, gradients=moments.gradients, tokens=moments.tokens)
    factors = weighted_svd(weight, moments, 6)
    assert all(each.isfinite().all() for each in (factors.left, factors.values, factors.right))
    empty = Moments(inputs=torch.zeros(8, 8), gradients=None, tokens=3)
    with pytest.raises(UserError, match="no input or no gradient at all"):
        weighted_svd(weight, empty, 4)


def made(m: int, n: int, values: list[float]) -> WeightedSVD:
    k = len(values)
    spectrum = torch.tensor(values)
    energy = float(spectrum.square().sum()) + 0.01
    return WeightedSVD(left=torch.zeros(m, k), values=spectrum, right=torch.zeros(k, n), energy=energy, scale=0.5)


def params_of(m: int, n: int, rank: int, form: str) -> int:
    return rank * (m + n) if form == "plain" else m * rank + rank * n - rank * rank


def every_allocation(factors: dict[str, WeightedSVD], budget: int, multiple: int, form: str) -> float:
    """The lowest loss of all combinations, by trying each."""
    lists = []
    for each in factors.values():
        m, n = each.shape
        ranks = [r for r in range(multiple, len(each.values) + 1, multiple) if r <= largest_rank(m, n, form)]
        lists.append([(params_of(m, n, r, form), each.costs()[r]) for r in ranks] + [(m * n, 0.0)])
    return min(
        sum(loss for _, loss in pick) for pick in itertools.product(*lists) if sum(cost for cost, _ in pick) <= budget
    )


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("budget", [95, 100, 110, 120, 130, 150])
def test_allocation_is_as_good_as_trying_all(budget, multiple, form):
    draw = torch.Generator().manual_seed(budget)
    factors = {
        name: made(m, n, sorted((10 * torch.rand(largest_rank(m, n, form), generator=draw)).tolist(), reverse=True))
        for name, (m, n) in {"a": (8, 8), "b": (8, 6), "c": (6, 10)}.items()
    }
    chosen = allocate(factors, budget, multiple=multiple, form=form)
    spent, loss = 0, 0.0
    for name, rank in chosen.items():
        m, n = factors[name].shape
        spent += m * n if rank is None else params_of(m, n, rank, form)
        loss += 0.0 if rank is None else factors[name].costs()[rank]
        assert rank is None or (rank % multiple == 0 and 1 <= rank <= largest_rank(m, n, form))
    assert spent <= budget
    best = every_allocation(factors, budget, multiple, form)
    assert best <= loss + 1e-9
    # Greedy steps of unequal prices may leave a few parameters unused; the loss stays near the optimum.
    assert loss <= best * 1.35 + 1e-9
    assert budget - spent < multiple * 16


def test_a_matrix_that_matters_gets_the_budget_and_stays_dense():
    factors = {"rich": made(8, 8, [100.0, 90.0, 80.0]), "poor": made(8, 8, [0.1, 0.01, 0.001])}
    assert allocate(factors, 64 + 16) == {"rich": None, "poor": 1}
    with pytest.raises(UserError, match="the smallest allocation, rank 1 for every matrix, has 32 parameters"):
        allocate(factors, 31)


def test_rounding_of_a_strong_direction_does_not_stop_the_decomposition():
    # Sums in fp32 round with the strongest of their directions; here that is far more than the damping adds.
    strong = torch.ones(64)
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 1e-3
    moment = 1e6 * torch.outer(strong, strong) + rows.T @ rows
    moment.diagonal().sub_(20.0)
    assert torch.linalg.eigvalsh(moment.double())[0] < -1e-5 * float(moment.diagonal().mean())
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    found = weighted_svd(weight, Moments(inputs=moment, gradients=torch.eye(32), tokens=200), 21)
    assert all(torch.isfinite(each).all() for each in (found.left, found.values, found.right))
    # The strong direction is kept: what the product returns for it is what the weight returns.
    product = (found.left * found.values) @ found.right
    torch.testing.assert_close(product @ strong, weight @ strong, rtol=1e-3, atol=1e-2)
