"""Weighted token embeddings against naive fp64 versions, the closed form, and gradient descent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmdistill.errors import UserError
from llmdistill.factorize.table_moments import TableMoments
from llmdistill.factorize.weighted_embedding import COLUMN_DAMPING, ROW_DAMPING, weighted_table

V, D, TOKENS = 30, 8, 500


def second_moment() -> torch.Tensor:
    rows = torch.randn(TOKENS, D) @ torch.randn(D, D)
    return rows.T @ rows


def moments(*, gradients: bool = True, tied: bool = True) -> TableMoments:
    return TableMoments(
        counts=(torch.rand(V) ** 4 * 100).round(),
        gradients=second_moment() if gradients else None,
        head_inputs=second_moment() if tied else None,
        head_outputs=torch.rand(V) ** 3 * 40 if tied and gradients else None,
        tokens=TOKENS,
    )


def metrics(given: TableMoments) -> torch.Tensor:
    """The matrix M_v (V, D, D) of each row, with the damping of the module, per token."""

    def rows(each: torch.Tensor) -> torch.Tensor:
        return each.double() + ROW_DAMPING * each.double().mean()

    def columns(each: torch.Tensor) -> torch.Tensor:
        return each.double() + COLUMN_DAMPING * each.double().trace() / D * torch.eye(D)

    lookups = torch.eye(D, dtype=torch.float64) if given.gradients is None else columns(given.gradients)
    found = torch.stack([count * lookups for count in rows(given.counts)])
    if given.head_outputs is not None:
        found += torch.stack([weight * columns(given.head_inputs) for weight in rows(given.head_outputs)])
    return found / 2 / TOKENS ** (1 if given.gradients is None else 2)


def naive_cost(error: torch.Tensor, given: TableMoments) -> torch.Tensor:
    """Σ_v δ_v M_v δ_vᵀ."""
    return torch.einsum("vi,vij,vj->", error.double(), metrics(given), error.double())


def by_descent(table: torch.Tensor, given: TableMoments, rank: int) -> float:
    """The cost that LBFGS finds from a random start."""
    a = torch.randn(V, rank, dtype=torch.float64, requires_grad=True)
    b = torch.randn(rank, D, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([a, b], max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-12)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = naive_cost(table.double() - a @ b, given)
        value.backward()
        return value

    optimizer.step(loss)
    return float(naive_cost((table.double() - a @ b).detach(), given))


@pytest.mark.parametrize(("gradients", "tied"), [(True, True), (True, False), (False, False)])
def test_no_gradient_descent_finds_better_factors(gradients: bool, tied: bool) -> None:
    table, given = torch.randn(V, D), moments(gradients=gradients, tied=tied)
    found = weighted_table(table, given, 3)
    own = float(naive_cost(table - found.left @ found.right, given))
    assert own == pytest.approx(found.cost, rel=1e-4)
    assert own <= by_descent(table, given, 3) * 1.01
    u, s, vh = torch.linalg.svd(table)
    assert own < 0.8 * naive_cost(table - (u[:, :3] * s[:3]) @ vh[:3], given)


def test_activations_weigh_each_use_by_its_share() -> None:
    """The units of embeddings and logits differ, so the scale of the head's inputs must not matter."""
    table, given = torch.randn(V, D), moments(gradients=False)
    one = weighted_table(table, given, 3)
    other = weighted_table(table, replace(given, head_inputs=1e4 * given.head_inputs), 3)
    torch.testing.assert_close(one.left @ one.right, other.left @ other.right, rtol=1e-4, atol=1e-5)


def test_a_table_of_a_lower_rank_is_exact() -> None:
    table = torch.randn(V, 2) @ torch.randn(2, D)
    found = weighted_table(table, moments(), 4)
    torch.testing.assert_close(found.left @ found.right, table, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sigma", ["left", "balanced"])
def test_the_parameters_have_the_same_product(sigma) -> None:
    found = weighted_table(torch.randn(V, D), moments(), 3)
    values = found.parameters(3, sigma)
    torch.testing.assert_close(values["A.weight"] @ values["B.weight"], found.left @ found.right, rtol=1e-4, atol=1e-5)
    gram = values["B.weight"] @ values["B.weight"].T
    expected = torch.eye(3) if sigma == "left" else torch.diag(values["A.weight"].square().sum(0))
    torch.testing.assert_close(gram, expected, rtol=1e-3, atol=1e-4)


def test_data_without_a_token_are_refused() -> None:
    with pytest.raises(UserError, match="no token or no gradient at all"):
        weighted_table(torch.randn(V, D), replace(moments(), counts=torch.zeros(V)), 3)
