"""Weighted matrices, Kronecker products and embeddings against naive fp64 versions, descent, and all allocations."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from references import truncated

from llmdistill.errors import UserError
from llmdistill.students.kronecker import KroneckerShape, nearest_kronecker
from llmdistill.students.start import weighted_kronecker as module
from llmdistill.students.start.moments import Moments
from llmdistill.students.start.table_moments import TableMoments
from llmdistill.students.start.weighted import (
    GRADIENT_DAMPING,
    INPUT_DAMPING,
    WeightedSVD,
    allocate,
    weighted_svd,
    weighted_svds,
)
from llmdistill.students.start.weighted_embedding import (
    COLUMN_DAMPING,
    ROW_DAMPING,
    nested_table,
    weighted_table,
)
from llmdistill.students.start.weighted_factors import WeightedFactors
from llmdistill.students.start.weighted_kronecker import WeightedKronecker, weighted_kronecker
from llmdistill.students.svd import factor_params, largest_rank, useful_ranks

TOKENS = 200


def second_moment(side):
    rows = torch.randn(TOKENS, side) @ torch.randn(side, side)
    return rows.T @ rows


def made(m, n, *, gradients=True):
    return Moments(inputs=second_moment(n), gradients=second_moment(m) if gradients else None, tokens=TOKENS)


def damped(moment, share):
    exact = moment.double()
    return exact + share * exact.trace() / len(exact) * torch.eye(len(exact))


def metric(moments, m):
    """G ⊗ C (mn, mn) with the damping, by which an error costs ½ tr(ΔᵀGΔC) / tokens²."""
    power = 1 if moments.gradients is None else 2
    outputs = torch.eye(m).double() if moments.gradients is None else damped(moments.gradients, GRADIENT_DAMPING)
    return torch.kron(outputs, damped(moments.inputs, INPUT_DAMPING)) / 2 / TOKENS**power


def naive_cost(weight, approximation, moments):
    """By the definition; without G half the squared error of the outputs per token."""
    error = (weight.double() - approximation).flatten()
    return error @ metric(moments, len(weight)) @ error


def by_descent(cost, m, n, rank):
    """The cost of a product that LBFGS finds from a random start."""
    a = torch.randn(m, rank, dtype=torch.float64, requires_grad=True)
    b = torch.randn(rank, n, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([a, b], max_iter=250, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def loss():
        optimizer.zero_grad()
        value = cost(a @ b)
        value.backward()
        return value

    optimizer.step(loss)
    return float(cost(a @ b))


def product(factors, rank):
    return ((factors.left[:, :rank] * factors.values[:rank]) @ factors.right[:rank]).double()


@pytest.mark.parametrize(("gradients", "m", "n"), [(True, 12, 20), (False, 20, 12)])
def test_no_gradient_descent_finds_a_better_product(gradients, m, n):
    weight, moments = torch.randn(m, n), made(m, n, gradients=gradients)
    cost = partial(naive_cost, weight, moments=moments)
    own = cost(product(weighted_svd(weight, moments, min(m, n)), 4))
    assert own <= by_descent(cost, m, n, 4) * (1 + 1e-3)
    assert own < 0.9 * cost(truncated(weight.double(), 4))


@pytest.mark.parametrize(("m", "n"), [(12, 20), (20, 12)])
@pytest.mark.parametrize("gradients", [True, False])
def test_matrices_that_are_decomposed_together_are_those_one_by_one(gradients, m, n):
    weights, ranks = [torch.randn(m, n) for _ in range(4)], [3, 9, 12, 5]
    moments = [made(m, n, gradients=gradients) for _ in weights]
    # One needs more damping than the others, one has a lower rank, and one equal values.
    moments[1].inputs.diagonal().sub_(0.9 * moments[1].inputs.diagonal().mean())
    weights[2][:, 4:] = 0
    weights[3] = torch.eye(m, n)
    together = weighted_svds(weights, moments, ranks)
    for weight, each, rank, found in zip(weights, moments, ranks, together, strict=True):
        alone = weighted_svd(weight, each, rank)
        torch.testing.assert_close(product(found, rank), product(alone, rank), rtol=0, atol=1e-4)
        torch.testing.assert_close(found.values, alone.values, rtol=1e-4, atol=1e-4)
        assert found.energy == pytest.approx(alone.energy)
        assert (found.scale, found.tokens, found.left.shape) == (alone.scale, alone.tokens, (m, rank))


@pytest.mark.parametrize("gradients", [True, False])
def test_the_predicted_cost_is_that_of_the_product(gradients):
    weight, moments = torch.randn(16, 10), made(16, 10, gradients=gradients)
    factors = weighted_svd(weight, moments, 10)
    for rank, cost in enumerate(costs := factors.costs()):
        assert cost == pytest.approx(float(naive_cost(weight, product(factors, rank), moments)), rel=2e-2, abs=1e-3)
    assert costs[10] == pytest.approx(0.0, abs=1e-6 * costs[0])
    for most in (6, 32):  # points of a plot
        spectrum = WeightedFactors(ranks={}, factors={"a": factors}, predicted_loss=0.0).spectra(most)["a"]
        ranks = [rank for rank, _ in spectrum["costs"]]
        assert spectrum == {"shape": [16, 10], "costs": [[rank, costs[rank]] for rank in ranks]}
        assert (ranks[0], ranks[-1]) == (0, 10)
        assert ranks == sorted(set(ranks))
        assert len(ranks) <= most


def test_inputs_that_are_never_there_are_damped_and_data_without_any_are_refused():
    weight, moments = torch.randn(12, 8), made(12, 8)
    moments.inputs[5] = moments.inputs[:, 5] = 0
    factors = weighted_svd(weight, moments, 8)
    assert all(each.isfinite().all() for each in (factors.left, factors.values, factors.right))
    empty, no_words = replace(moments, inputs=torch.zeros(8, 8)), replace(table_moments(), counts=torch.zeros(V))
    kronecker = (weighted_kronecker, empty, KroneckerShape(3, 4))
    for decompose, data, size in ((weighted_svd, empty, 4), kronecker, (weighted_table, no_words, 3)):
        with pytest.raises(UserError, match=r"no (input|token) or no gradient at all"):
            decompose(weight, data, size)


def spectrum_of(m, n, values):
    k, spectrum = len(values), torch.tensor(sorted(values, reverse=True))
    energy = float(spectrum.square().sum()) + 0.01
    return WeightedSVD(left=torch.zeros(m, k), values=spectrum, right=torch.zeros(k, n), energy=energy, scale=0.5)


def every_allocation(factors, budget, multiple, form):
    """The lowest loss of all combinations, by trying each."""
    lists = []
    for each in factors.values():
        m, n = each.shape
        ranks = [r for r in range(multiple, len(each.values) + 1, multiple) if r <= largest_rank(m, n, form)]
        lists.append([(factor_params(m, n, r, form), each.costs()[r]) for r in ranks] + [(m * n, 0.0)])
    return min(
        sum(loss for _, loss in pick) for pick in itertools.product(*lists) if sum(cost for cost, _ in pick) <= budget
    )


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("multiple", [1, 2])
@pytest.mark.parametrize("budget", [95, 110, 130, 150])
def test_allocation_is_as_good_as_trying_all(budget, multiple, form):
    draw = torch.Generator().manual_seed(budget)
    factors = {
        name: spectrum_of(m, n, (10 * torch.rand(largest_rank(m, n, form), generator=draw)).tolist())
        for name, (m, n) in {"a": (8, 8), "b": (8, 6), "c": (6, 10)}.items()
    }
    chosen = allocate(factors, budget, multiple=multiple, form=form)
    spent, loss = 0, 0.0
    for name, rank in chosen.items():
        m, n = factors[name].shape
        spent += m * n if rank is None else factor_params(m, n, rank, form)
        loss += 0.0 if rank is None else factors[name].costs()[rank]
        assert rank is None or (rank % multiple == 0 and 1 <= rank <= largest_rank(m, n, form))
    assert spent <= budget
    best = every_allocation(factors, budget, multiple, form)
    assert best <= loss + 1e-9
    # Greedy steps of unequal prices may leave a few parameters unused; the loss stays near the optimum.
    assert loss <= best * 1.35 + 1e-9
    assert budget - spent < multiple * 16


@pytest.mark.parametrize(("side", "multiples"), [(1024, (64, 8)), (1023, (8, 1)), (256, (8, 1)), (255, (1, 1))])
def test_the_multiple_of_a_matrix_follows_from_its_smaller_side(side, multiples):
    unit, next_unit = multiples
    for m, n in ((side, 2 * side), (3 * side, side)):
        ranks = useful_ranks(m, n, "auto")
        assert ranks[0] == 1, "no target is out of reach that exact ranks reach"
        assert all(rank % unit == 0 for rank in ranks if rank >= unit)
        assert all(rank % next_unit == 0 for rank in ranks if next_unit <= rank < unit)
        assert ranks[-1] * (m + n) < m * n <= (ranks[-1] + unit) * (m + n)


def test_ranks_by_loss_are_multiples_where_the_matrix_is_wide():
    def decaying(m, n):
        return spectrum_of(m, n, torch.logspace(0, -2, min(m, n)).tolist())

    factors = {"wide": decaying(512, 256), "narrow": decaying(128, 96)}
    budget = int(0.4 * (512 * 256 + 128 * 96))
    exact, rounded = (allocate(factors, budget, multiple=multiple) for multiple in (1, "auto"))
    assert rounded["wide"] % 8 == 0 != exact["wide"] % 8
    assert 0 < budget - sum(rank * sum(factors[name].shape) for name, rank in rounded.items()) < 128 + 96


def test_a_matrix_that_matters_gets_the_budget_and_stays_dense():
    factors = {"rich": spectrum_of(8, 8, [100.0, 90.0, 80.0]), "poor": spectrum_of(8, 8, [0.1, 0.01, 0.001])}
    assert allocate(factors, 64 + 16) == {"rich": None, "poor": 1}


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
    torch.testing.assert_close(product(found, 21).float() @ strong, weight @ strong, rtol=1e-3, atol=1e-2)


# Kronecker products.

SHAPES = [((12, 8), KroneckerShape(3, 4, 2)), ((8, 12), KroneckerShape(4, 2, 3)), ((6, 10), KroneckerShape(6, 1, 1))]


def kron_sum(a, b):
    return sum((torch.kron(x, y) for x, y in zip(a.double(), b.double(), strict=True)), torch.zeros(()).double())


def by_least_squares(weight, moments, shape, rounds):
    """The cost after exact alternating least squares whose normal equations are built entry by entry."""
    full = metric(moments, len(weight))
    a, b = (each.clone() for each in nearest_kronecker(weight.double(), shape))
    for _ in range(rounds):
        for mine in (a, b):
            units = torch.eye(mine.numel()).unflatten(1, mine.shape)
            columns = [kron_sum(unit, b) if mine is a else kron_sum(a, unit) for unit in units]
            basis = torch.stack(columns).flatten(1).T
            found = torch.linalg.lstsq(basis.T @ full @ basis, basis.T @ full @ weight.double().flatten())
            mine.copy_(found.solution.reshape(mine.shape))
    return float(naive_cost(weight, kron_sum(a, b), moments))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(("size", "shape"), SHAPES)
def test_it_is_as_good_as_exact_alternating_least_squares(size, shape, gradients, monkeypatch):
    weight, moments = torch.randn(size), made(*size, gradients=gradients)
    monkeypatch.setattr(module, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(module, "ROUNDS", 40)
    found = weighted_kronecker(weight, moments, shape)
    own = float(naive_cost(weight, kron_sum(found.a, found.b), moments))
    assert own == pytest.approx(found.cost, rel=1e-4)
    assert own <= 1.1 * by_least_squares(weight, moments, shape, rounds=15)
    assert own < 0.95 * naive_cost(weight, kron_sum(*nearest_kronecker(weight, shape)), moments)


def test_moments_that_are_products_need_no_round(monkeypatch):
    """Then whitening gives the optimum, which no exact alternation improves."""
    weight, shape = torch.randn(12, 8), KroneckerShape(3, 4, 2)
    sides = [second_moment(side) for side in (3, 4, 4, 2)]
    moments = Moments(inputs=torch.kron(*sides[2:]), gradients=torch.kron(*sides[:2]), tokens=TOKENS)
    monkeypatch.setattr(module, "ROUNDS", 0)
    own = weighted_kronecker(weight, moments, shape).cost
    assert own == pytest.approx(by_least_squares(weight, moments, shape, rounds=20), rel=0.02)


def test_the_two_factors_of_a_product_have_the_same_norm():
    a, b = torch.randn(2, 3, 4), 7 * torch.randn(2, 4, 2)
    values = WeightedKronecker(a=a, b=b, cost=0.0, tokens=1).parameters(KroneckerShape(3, 4, 2), "left")
    torch.testing.assert_close(kron_sum(values["A"], values["B"]), kron_sum(a, b), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values["A"].flatten(1).norm(dim=1), values["B"].flatten(1).norm(dim=1))


# Token embeddings.

V, D = 30, 8


def table_moments(*, gradients=True, tied=True):
    return TableMoments(
        counts=(torch.rand(V) ** 4 * 100).round(),
        gradients=second_moment(D) if gradients else None,
        head_inputs=second_moment(D) if tied else None,
        head_outputs=torch.rand(V) ** 3 * 40 if tied and gradients else None,
        tokens=TOKENS,
    )


def table_metrics(given):
    """The matrix M_v (V, D, D) of each row, with the damping of the module, per token."""

    def rows(weights, of_columns):
        exact = weights.double()
        return (exact + ROW_DAMPING * exact.mean())[:, None, None] * of_columns

    found = rows(given.counts, torch.eye(D) if given.gradients is None else damped(given.gradients, COLUMN_DAMPING))
    if given.head_outputs is not None:
        found += rows(given.head_outputs, damped(given.head_inputs, COLUMN_DAMPING))
    return found / 2 / TOKENS ** (1 if given.gradients is None else 2)


@pytest.mark.parametrize(("gradients", "tied"), [(True, True), (True, False), (False, False)])
def test_no_gradient_descent_finds_a_better_table(gradients, tied):
    table, given = torch.randn(V, D), table_moments(gradients=gradients, tied=tied)
    found, full = weighted_table(table, given, 3), table_metrics(given)

    def cost(approximation):  # Σ_v δ_v M_v δ_vᵀ
        error = table.double() - approximation
        return torch.einsum("vi,vij,vj->", error, full, error)

    own = float(cost(found.left @ found.right))
    assert own == pytest.approx(found.cost, rel=1e-4)
    assert own <= by_descent(cost, V, D, 3) * 1.01
    assert own < 0.8 * cost(truncated(table.double(), 3))


@pytest.mark.parametrize(("gradients", "tied"), [(True, True), (True, False), (False, False)])
def test_one_decomposition_of_a_table_has_the_cost_of_every_rank(gradients, tied):
    table, given = torch.randn(V, D), table_moments(gradients=gradients, tied=tied)
    found, full = nested_table(table, given), table_metrics(given)
    for rank in range(D + 1):
        leading = found.leading(rank)
        error = (table - leading.left @ leading.right).double()
        assert leading.cost == pytest.approx(float(torch.einsum("vi,vij,vj->", error, full, error)), rel=1e-3, abs=1e-6)
    best = weighted_table(table, given, 3)
    assert best.cost <= found.leading(3).cost * 1.0001
    assert found.leading(3).cost < 1.1 * best.cost


def test_activations_weigh_each_use_by_its_share():
    """The units of embeddings and logits differ, so the scale of the head's inputs must not matter."""
    table, given = torch.randn(V, D), table_moments(gradients=False)
    one = weighted_table(table, given, 3)
    other = weighted_table(table, replace(given, head_inputs=1e4 * given.head_inputs), 3)
    torch.testing.assert_close(one.left @ one.right, other.left @ other.right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sigma", ["left", "balanced"])
def test_the_parameters_have_the_same_product(sigma):
    found = weighted_table(torch.randn(V, D), table_moments(), 3)
    values = found.parameters(3, sigma)
    torch.testing.assert_close(values["A.weight"] @ values["B.weight"], found.left @ found.right, rtol=1e-4, atol=1e-5)
    gram = values["B.weight"] @ values["B.weight"].T
    expected = torch.eye(3) if sigma == "left" else torch.diag(values["A.weight"].square().sum(0))
    torch.testing.assert_close(gram, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gradients", [True, False])
def test_directions_that_a_matrix_of_lower_rank_leaves_open_do_not_depend_on_rounding(gradients):
    def of_rank_two(m, n):
        return (torch.randint(-3, 4, (m, 2)) @ torch.randint(-3, 4, (2, n))).float()

    def rounded(data):
        """The same sums, rounded as another processor would."""
        moved = {}
        for key, each in vars(data).items():
            noise = torch.randn(each.shape) if torch.is_tensor(each) else None
            moved[key] = each if noise is None else each * (1 + 1e-7 * (noise + noise.mT if noise.ndim > 1 else noise))
        return replace(data, **moved)

    weight, moments = of_rank_two(16, 10), made(16, 10, gradients=gradients)
    table, one, tied = of_rank_two(V, D), table_moments(gradients=gradients, tied=False), table_moments()
    pairs = [[weighted_svd(weight, each, 8) for each in (moments, rounded(moments))]]
    pairs += [[weighted_table(table, each, 5) for each in (data, rounded(data))] for data in (one, tied)]
    for first, second in pairs:
        ours, theirs = (each.parameters(5, "left") for each in (first, second))
        for key, axis in (("A.weight", 0), ("B.weight", 1)) if first is pairs[0][0] else (("B.weight", 0),):
            signs = (ours[key] * theirs[key]).sum(dim=1 - axis, keepdim=True).sign()
            assert (signs != 0).any()
            torch.testing.assert_close(ours[key], theirs[key] * signs, rtol=0, atol=1e-4)
