"""Kronecker modules against the dense product: values, gradients, FLOPs, and the SVD as their special case."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from llmdistill.factorize.kronecker import KroneckerShape
from llmdistill.factorize.modules import KroneckerEmbedding, KroneckerHead, KroneckerLinear

# Outputs, inputs, A's rows and columns: either factor the smaller, either order the cheaper, sides of 1 on each.
SHAPES = [
    (12, 10, 2, 5), (12, 10, 6, 5), (12, 10, 6, 2), (12, 10, 3, 1), (12, 10, 12, 1), (12, 10, 1, 10),
    (12, 10, 1, 1), (12, 10, 12, 10), (3, 20, 3, 2), (20, 3, 2, 3), (16, 24, 8, 2), (24, 16, 2, 8), (7, 9, 7, 3),
]  # fmt: skip


def kron_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.kron(one, other) for one, other in zip(a, b, strict=True)]).sum(0)


def make(m: int, n: int, m1: int, n1: int, sums: int, *, bias: bool = True) -> KroneckerLinear:
    module = KroneckerLinear(n, m, KroneckerShape(m1, n1, sums), bias=bias).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def most(m: int, n: int, m1: int, n1: int) -> int:
    return min(m1 * n1, m * n // (m1 * n1))


@pytest.mark.parametrize("sums", [1, 3])
@pytest.mark.parametrize(("m", "n", "m1", "n1"), SHAPES)
@pytest.mark.parametrize("b_first", [True, False])
def test_forward_and_backward_are_those_of_the_dense_product(m, n, m1, n1, sums, b_first) -> None:
    module = make(m, n, m1, n1, min(sums, most(m, n, m1, n1)))
    module.b_first = b_first
    factors = [parameter.detach().clone().requires_grad_() for parameter in (module.A, module.B, module.bias)]
    x, upstream = torch.randn(2, 3, n, dtype=torch.float64), torch.randn(2, 3, m, dtype=torch.float64)
    ours, dense = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = module(ours)
    expected = functional.linear(dense, kron_sum(*factors[:2]), factors[2])
    torch.testing.assert_close(y, expected)
    y.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(ours.grad, dense.grad)
    for parameter, reference in zip((module.A, module.B, module.bias), factors, strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)
    torch.testing.assert_close(module.weight, kron_sum(*factors[:2]))


def test_without_bias_and_in_any_layout() -> None:
    module = make(12, 10, 6, 5, 2, bias=False)
    assert module.bias is None
    assert [name for name, _ in module.named_parameters()] == ["A", "B"]
    x = torch.randn(10, 4, dtype=torch.float64).T
    expected = x @ kron_sum(module.A, module.B).T
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module(x[0]), expected[0])
    assert module(x[:0]).shape == (0, 12)


def test_the_dense_product_is_never_built() -> None:
    module = KroneckerLinear(768, 3072, KroneckerShape(16, 2), bias=True)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
        module(torch.randn(2, 768)).sum()
    assert max(sizes) <= module.B.numel()


def test_fresh_weights_are_as_large_as_a_linears() -> None:
    for sums in (1, 4):
        module = KroneckerLinear(256, 512, KroneckerShape(16, 16, sums), bias=True)
        assert module.weight.std().item() == pytest.approx(nn.Linear(256, 512).weight.std().item(), rel=0.2)


@pytest.mark.parametrize("columns", [1, 4, 12])
def test_embedding_rows_are_products(columns: int) -> None:
    embedding = KroneckerEmbedding(20, 12, columns).double()
    nn.init.normal_(embedding.B.weight)
    ids = torch.tensor([[3, 0, 19], [7, 7, 1]])
    rows = embedding(ids)
    for place in itertools.product(range(2), range(3)):
        expected = np.kron(embedding.A.weight[ids[place]].detach(), embedding.B.weight.detach())  # eq. 8
        np.testing.assert_allclose(rows[place].detach(), expected)
    torch.testing.assert_close(embedding.dense()[ids], rows)


def test_tied_head_gives_the_logits_of_the_dense_table() -> None:
    embedding = KroneckerEmbedding(20, 12, 4).double()
    nn.init.normal_(embedding.B.weight)
    head = KroneckerHead(12, 20, 4, bias=True).double()
    head.A.weight, head.B.weight = embedding.B.weight, embedding.A.weight
    hidden = torch.randn(2, 3, 12, dtype=torch.float64)
    table = embedding.dense()
    torch.testing.assert_close(head(hidden), hidden @ table.T + head.B.bias)
    torch.testing.assert_close(head.weight, table)
    upstream = torch.randn(2, 3, 20, dtype=torch.float64)
    gradients = torch.autograd.grad((head(hidden) * upstream).sum(), [embedding.A.weight, embedding.B.weight])
    expected = torch.autograd.grad((hidden @ table.T * upstream).sum(), [embedding.A.weight, embedding.B.weight])
    torch.testing.assert_close(gradients, expected)
    leaves = [module for module in head.modules() if not list(module.children())]
    assert type(leaves[-1]) is nn.Linear  # what fused losses take over
