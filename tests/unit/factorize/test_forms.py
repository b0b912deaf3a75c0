"""Pivoted factors and Kronecker modules against the dense product that they store: values, gradients, counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import qr
from torch import nn
from torch.nn import functional

from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.forms import factor_params, largest_rank, pivoted
from llmdistill.factorize.kinds import KINDS
from llmdistill.factorize.kronecker import KroneckerShape
from llmdistill.factorize.modules import KroneckerLinear, PivotedLinear

MATRICES = {
    "graded": lambda m, n: torch.logspace(0, -6, m)[torch.randperm(m)][:, None] * torch.randn(m, n),
    # Of rank 3, so that other directions of the outputs are arbitrary.
    "repeated": lambda m, n: torch.randn(3, n).repeat(m, 1)[:m],
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
@pytest.mark.parametrize(("m", "n", "rank"), [(12, 10, 1), (12, 10, 9), (10, 40, 5), (40, 10, 7)])
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


def copies(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone().requires_grad_() for name, each in module.named_parameters()}


def check_against(module: PivotedLinear | KroneckerLinear, product: torch.Tensor, copied: dict) -> None:
    """Values and gradients are those of the dense product of the copied parameters, for inputs in any layout."""
    x = torch.randn(module.in_features, 3, 2, dtype=torch.float64).transpose(0, 2)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = module(ours), functional.linear(theirs, product, copied.get("bias"))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(module.weight, product)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for name, reference in copied.items():
        torch.testing.assert_close(module.get_parameter(name).grad, reference.grad)
    assert module(x[:0]).shape == (0, 3, module.out_features)


def test_pivoted_linears_are_the_dense_product_forward_and_backward() -> None:
    module = stored(torch.randn(12, 10), 4)[0].double()
    nn.init.normal_(module.bias)
    copied = copies(module)
    a, b = copied["A.weight"], copied["B.weight"]
    # The place of an output in [z, z B] says whether it is a pivot.
    dense = torch.stack([a[place] if place < 4 else b[place - 4] @ a for place in module.order.tolist()])
    check_against(module, dense, copied)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (8, 6), (6, 10), (1, 5), (2, 2)])
@pytest.mark.parametrize("form", ["plain", "pivoted"])
def test_the_largest_rank_is_the_last_that_is_smaller(m: int, n: int, form: str) -> None:
    smaller = [rank for rank in range(1, min(m, n) + 1) if rank * (m + n - (rank if form == "pivoted" else 0)) < m * n]
    assert largest_rank(m, n, form) == max(smaller, default=0)
    assert factor_params(m, n, largest_rank(m, n, form) + 1, form) == m * n


# Kronecker products.

# Outputs, inputs, A's rows and columns: either factor the smaller, either order the cheaper, sides of 1 on each.
SHAPES = [
    (12, 10, 2, 5), (12, 10, 6, 5), (12, 10, 6, 2), (12, 10, 3, 1), (12, 10, 12, 1), (12, 10, 1, 10),
    (12, 10, 1, 1), (12, 10, 12, 10), (3, 20, 3, 2), (20, 3, 2, 3), (16, 24, 8, 2), (24, 16, 2, 8), (7, 9, 7, 3),
]  # fmt: skip


@pytest.mark.parametrize("sums", [1, 3])
@pytest.mark.parametrize(("m", "n", "m1", "n1"), SHAPES)
@pytest.mark.parametrize("b_first", [True, False])
def test_kronecker_linears_are_the_dense_product_forward_and_backward(m, n, m1, n1, sums, b_first) -> None:
    shape = KroneckerShape(m1, n1, min(sums, m1 * n1, m * n // (m1 * n1)))
    module = KroneckerLinear(n, m, shape, bias=b_first).double()
    module.b_first = b_first
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    copied = copies(module)
    pairs = zip(copied["A"], copied["B"], strict=True)
    check_against(module, torch.stack([torch.kron(one, other) for one, other in pairs]).sum(0), copied)


def test_the_dense_product_is_never_built() -> None:
    module = KroneckerLinear(768, 3072, KroneckerShape(16, 2), bias=True)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
        module(torch.randn(2, 768)).sum()
    assert max(sizes) <= module.B.numel()
