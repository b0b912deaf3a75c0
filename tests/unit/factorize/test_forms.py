"""Pivoted factors against the dense product that they store: values, gradients, counts and ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.linalg import qr
from tiny import tiny_config
from torch.nn import functional

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.forms import factor_params, largest_rank, pivoted
from llmdistill.factorize.kinds import KINDS
from llmdistill.factorize.modules import PivotedLinear
from llmdistill.factorize.sizes import rank_budget
from llmdistill.models.load import build_meta

LLAMA = tiny_config("llama", hidden_size=32, intermediate_size=48, vocab_size=96, tie_word_embeddings=True)


def drawn(m: int, n: int) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(m + n))


MATRICES: dict[str, Callable[[int, int], torch.Tensor]] = {
    "random": drawn,
    "graded": lambda m, n: torch.logspace(0, -6, m)[torch.randperm(m)][:, None] * drawn(m, n),
    "repeated": lambda m, n: drawn(3, n).repeat(m, 1)[:m],  # rank 3: other directions of the outputs are arbitrary
    "zero": torch.zeros,
}


def stored(weight: torch.Tensor, rank: int) -> tuple[PivotedLinear, torch.Tensor]:
    """A pivoted module with the truncated SVD of a weight, and this product in fp64 by torch alone."""
    kind = KINDS["pivoted"]
    values = kind.parameters(kind.factors(weight, rank, "left"))
    module = PivotedLinear(weight.shape[1], weight.shape[0], rank, bias=True)
    module.load_state_dict(values, strict=False)
    u, s, vh = torch.linalg.svd(weight.double(), full_matrices=False)
    return module, (u[:, :rank] * s[:rank]) @ vh[:rank]


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(("m", "n", "rank"), [(12, 10, 1), (12, 10, 9), (10, 40, 5), (40, 10, 7), (16, 16, 15)])
def test_the_product_is_that_of_the_truncated_svd(m: int, n: int, rank: int, matrix: str) -> None:
    weight = MATRICES[matrix](m, n)
    module, product = stored(weight, rank)
    torch.testing.assert_close(module.dense().double(), product, rtol=0, atol=1e-5 * float(weight.abs().max()))
    assert sorted(module.order.tolist()) == list(range(m))
    assert float(module.B.weight.detach().abs().max()) <= 2 + 1e-6
    assert count_parameters(module) - m == factor_params(m, n, rank, "pivoted") == rank * (m + n - rank)


def kahan(k: int, c: float = 0.285) -> torch.Tensor:
    """(k + 1, k), of which QR with column pivoting takes the first k rows and then needs large weights for the last."""
    s = (1 - c * c) ** 0.5
    rows = torch.eye(k, k + 1).double() - c * torch.ones(k, k + 1).double().triu(1)
    rows *= (s ** torch.arange(k))[:, None] * 0.999 ** torch.arange(k + 1)  # no two rows are equally long
    return rows.T


def test_weights_stay_small_where_pivoting_alone_does_not_keep_them_so() -> None:
    weight = kahan(25)
    _, pivots = qr(weight.numpy().T, mode="r", pivoting=True)
    left_out = np.linalg.solve(weight.numpy()[pivots[:25]].T, weight.numpy()[pivots[25]])
    assert np.abs(left_out).max() > 50
    values = pivoted({"A.weight": torch.eye(25).double(), "B.weight": weight})
    assert float(values["B.weight"].abs().max()) <= 2
    product = torch.cat([values["A.weight"], values["B.weight"] @ values["A.weight"]])[values["order"]]
    torch.testing.assert_close(product, weight)


def test_forward_and_backward_are_those_of_the_dense_product() -> None:
    module = stored(drawn(12, 10), 4)[0].double()
    with torch.no_grad():
        module.bias.normal_(generator=torch.Generator().manual_seed(0))
    a, b, bias = (each.detach().clone().requires_grad_() for each in (module.A.weight, module.B.weight, module.bias))
    # The place of an output in [z, z B] says whether it is a pivot.
    dense = torch.stack([a[place] if place < 4 else b[place - 4] @ a for place in module.order.tolist()])
    x, upstream = torch.randn(2, 3, 10).double(), torch.randn(2, 3, 12).double()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = module(ours), functional.linear(theirs, dense, bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(module.weight, dense)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for parameter, reference in zip((module.A.weight, module.B.weight, module.bias), (a, b, bias), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (8, 6), (6, 10), (1, 5), (2, 2)])
@pytest.mark.parametrize("form", ["plain", "pivoted"])
def test_the_largest_rank_is_the_last_that_is_smaller(m: int, n: int, form: str) -> None:
    smaller = [rank for rank in range(1, min(m, n) + 1) if rank * (m + n - (rank if form == "pivoted" else 0)) < m * n]
    assert largest_rank(m, n, form) == max(smaller, default=0)
    assert factor_params(m, n, largest_rank(m, n, form) + 1, form) == m * n


def test_a_target_out_of_reach_is_refused() -> None:
    model = build_meta(LLAMA, "lm_head")
    with pytest.raises(UserError, match="is out of reach"):
        rank_budget(model, FactorizeConfig(target_params=4000, weighting="gradients", form="pivoted"))
