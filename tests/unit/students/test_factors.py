"""Factors and their modules against the dense product that they store, decompositions against what they leave out."""

import itertools
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from references import truncated
from scipy.linalg import qr
from torch import nn
from torch.nn import functional

from llmdistill.students import svd
from llmdistill.students.counting import count_parameters
from llmdistill.students.kinds import KINDS
from llmdistill.students.kronecker import KroneckerShape, nearest_kronecker, rearrange
from llmdistill.students.modules import KroneckerLinear, PivotedLinear
from llmdistill.students.svd import factor_params, largest_rank, pivot_factors

MATRICES = {
    "graded": lambda m, n: torch.logspace(0, -6, m)[torch.randperm(m)][:, None] * torch.randn(m, n),
    # Of rank 3, so that other directions of the outputs are arbitrary.
    "repeated": lambda m, n: torch.randn(3, n).repeat(m, 1)[:m],
    "zero": torch.zeros,
}


def stored(weight, rank):
    """A pivoted module with the truncated SVD of a weight, and this product in fp64 by torch alone."""
    kind = KINDS["pivoted"]
    values = kind.parameters(kind.factors(weight, rank, "left"))
    module = PivotedLinear(weight.shape[1], weight.shape[0], rank, bias=True)
    module.load_state_dict(values, strict=False)
    return module, truncated(weight.double(), rank)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(("m", "n", "rank"), [(12, 10, 1), (12, 10, 9), (10, 40, 5), (40, 10, 7)])
def test_the_product_is_that_of_the_truncated_svd(m, n, rank, matrix):
    weight = MATRICES[matrix](m, n)
    module, product = stored(weight, rank)
    torch.testing.assert_close(module.dense().double(), product, rtol=0, atol=1e-5 * float(weight.abs().max()))
    assert sorted(module.order.tolist()) == list(range(m))
    assert float(module.B.weight.detach().abs().max()) <= 2 + 1e-6
    assert count_parameters(module) - m == factor_params(m, n, rank, "pivoted") == rank * (m + n - rank)


def kahan(k, c=0.285):
    """(k + 1, k), of which QR with column pivoting takes the first k rows and then needs large weights for the last."""
    s = (1 - c * c) ** 0.5
    rows = torch.eye(k, k + 1).double() - c * torch.ones(k, k + 1).double().triu(1)
    rows *= (s ** torch.arange(k))[:, None] * 0.999 ** torch.arange(k + 1)  # no two rows are equally long
    return rows.T


@pytest.mark.parametrize(("k", "least", "most"), [(12, 2.5, 10), (25, 50, 1000)])
def test_weights_stay_small_where_pivoting_alone_does_not_keep_them_so(k, least, most):
    weight = kahan(k)
    _, pivots = qr(weight.numpy().T, mode="r", pivoting=True)
    left_out = np.linalg.solve(weight.numpy()[pivots[:k]].T, weight.numpy()[pivots[k]])
    assert least < np.abs(left_out).max() < most
    values = pivot_factors({"A.weight": torch.eye(k).double(), "B.weight": weight})
    assert float(values["B.weight"].abs().max()) <= 2
    product = torch.cat([values["A.weight"], values["B.weight"] @ values["A.weight"]])[values["order"]]
    torch.testing.assert_close(product, weight)


def copies(module):
    return {name: each.detach().clone().requires_grad_() for name, each in module.named_parameters()}


def check_against(module, product, copied):
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


def test_pivoted_linears_are_the_dense_product_forward_and_backward():
    module = stored(torch.randn(12, 10), 4)[0].double()
    nn.init.normal_(module.bias)
    copied = copies(module)
    a, b = copied["A.weight"], copied["B.weight"]
    # The place of an output in [z, z B] says whether it is a pivot.
    dense = torch.stack([a[place] if place < 4 else b[place - 4] @ a for place in module.order.tolist()])
    check_against(module, dense, copied)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (8, 6), (6, 10), (1, 5), (2, 2)])
@pytest.mark.parametrize("form", ["plain", "pivoted"])
def test_the_largest_rank_is_the_last_that_is_smaller(m, n, form):
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
def test_kronecker_linears_are_the_dense_product_forward_and_backward(m, n, m1, n1, sums, b_first):
    shape = KroneckerShape(m1, n1, min(sums, m1 * n1, m * n // (m1 * n1)))
    module = KroneckerLinear(n, m, shape, bias=b_first).double()
    module.b_first = b_first
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    copied = copies(module)
    pairs = zip(copied["A"], copied["B"], strict=True)
    check_against(module, torch.stack([torch.kron(one, other) for one, other in pairs]).sum(0), copied)


def test_the_dense_product_is_never_built():
    module = KroneckerLinear(768, 3072, KroneckerShape(16, 2), bias=True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), lambda _: None):
        module(torch.randn(2, 768)).sum()
    assert max(sizes) <= module.B.numel()


# The decompositions.


def kron_sum(a, b):
    return np.sum([np.kron(one, other) for one, other in zip(a.double().numpy(), b.double().numpy(), strict=True)], 0)


def test_rearrangement_is_that_of_equation_3():
    """A row for each block, rank one for a Kronecker product, and the same norm."""
    weight = torch.arange(24.0).view(4, 6)
    rearranged = rearrange(weight, KroneckerShape(2, 3))
    for i in range(2):
        for j in range(3):
            block = weight[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert torch.equal(rearranged[3 * i + j], block.reshape(-1))
    assert rearrange(weight, KroneckerShape(4, 3)).data_ptr() == weight.data_ptr()  # a table is not copied


# Square, wide and tall; A a column and B a row, as in SVD, or all of it; and large: thin either way, with more columns
# than are taken to fp64 at a time, and nearly square, where Lanczos' method works.
@pytest.mark.parametrize(("size", "shape"), [
    ((12, 10), KroneckerShape(3, 2, 2)), ((6, 30), KroneckerShape(2, 3, 3)), ((30, 6), KroneckerShape(15, 1)),
    ((9, 8), KroneckerShape(1, 8, 2)), ((8, 8), KroneckerShape(8, 8)),
    ((600, 640), KroneckerShape(300, 320)), ((600, 640), KroneckerShape(2, 2)), ((576, 576), KroneckerShape(24, 24, 2)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_other_products_are_nearer(size, shape, dtype, monkeypatch):
    monkeypatch.setattr(svd, "CHUNK_ELEMENTS", 2**14)
    (m, n), (m1, n1, sums) = size, shape
    weight = torch.randn(size).to(dtype)
    a, b = nearest_kronecker(weight.T.contiguous().T, shape)
    assert a.dtype == b.dtype == torch.float32
    assert (a.shape, b.shape) == ((sums, m1, n1), (sums, m // m1, n // n1))
    torch.testing.assert_close(a.flatten(1).norm(dim=1), b.flatten(1).norm(dim=1))  # √σ in both (eq. 4, 5)
    missed = np.linalg.norm(weight.double().numpy() - kron_sum(a, b))
    assert missed <= optimum(rearrange(weight, shape), sums) * (1 + 1e-6) + 1e-6 * float(weight.norm())


def test_lanczos_and_the_full_decomposition_agree(monkeypatch):
    weight = torch.randn(576, 576)
    found = kron_sum(*nearest_kronecker(weight, KroneckerShape(24, 24, 3)))
    eigsh = Mock(side_effect=svd.ArpackError(-9999))
    monkeypatch.setattr(svd, "eigsh", eigsh)
    np.testing.assert_allclose(kron_sum(*nearest_kronecker(weight, KroneckerShape(24, 24, 3))), found, atol=1e-5)
    eigsh.assert_called()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [KroneckerShape(300, 320), KroneckerShape(24, 32, 2)])
def test_cuda_input_stays_there(shape):
    weight = torch.randn(576 if shape.m1 == 24 else 600, 640, device="cuda")
    found = nearest_kronecker(weight, shape)
    assert all(factors.is_cuda for factors in found)
    own = (factors.cpu() for factors in found)
    np.testing.assert_allclose(kron_sum(*own), kron_sum(*nearest_kronecker(weight.cpu(), shape)), atol=1e-4)


# The truncated SVD.


def optimum(matrix, rank):
    """Eckart-Young: the root of the sum of the squared singular values that are left out."""
    return torch.linalg.svdvals(matrix.double())[rank:].square().sum().sqrt().item()


def error(matrix, factors):
    u, s, vh = (factor.double() for factor in factors)
    return torch.linalg.norm(matrix.double() - (u * s) @ vh).item()


def with_spectrum(n, m, values):
    """An fp32 matrix (n, m) with those singular values."""
    u = torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(m, len(values), dtype=torch.float64)).Q
    return ((u * values) @ v.T).float()


# The first two run through the full SVD, the others through the Gram matrix, in several chunks of columns.
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (520, 2500), (2500, 520)])
def test_error_is_the_optimum(shape):
    matrix, rank = torch.randn(shape), 40
    factors = svd.truncated_svd(matrix, rank)
    assert error(matrix, factors) <= optimum(matrix, rank) * (1 + 1e-6)
    for got, wanted in zip(factors, [(shape[0], rank), (rank,), (rank, shape[1])], strict=True):
        assert got.shape == wanted
        assert got.dtype == torch.float32


@pytest.mark.parametrize("shape", [(30, 40), (40, 30)])
def test_matrices_together_are_those_one_by_one(shape):
    spectra = ([8.0, 6, 4, 2], [5.0, 4, 3, 3, 3, 1], [2.0] * 30, [*range(30, 0, -1)])
    matrices = torch.zeros(len(spectra), *shape, dtype=torch.float64)  # in fp32 no two values would be equal
    for matrix, values in zip(matrices, spectra, strict=True):
        u, v = (torch.linalg.qr(torch.randn(side, len(values), dtype=torch.float64)).Q for side in shape)
        matrix += (u * torch.tensor(values, dtype=torch.float64)) @ v.T
    for place, rank in itertools.product(range(len(matrices)), (3, 9)):
        found = [side[place] for side in svd.truncated_svds(matrices, rank)]
        alone = svd.truncated_svd(matrices[place], rank)
        signs = (found[0] * alone[0]).sum(dim=0).sign()
        torch.testing.assert_close(found[0], alone[0] * signs, rtol=0, atol=1e-4)
        torch.testing.assert_close(found[1], alone[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[2], alone[2] * signs[:, None], rtol=0, atol=1e-4)


def test_steep_spectrum_is_resolved():
    # Singular values from 1 to 1e-5: an fp32 Gram matrix would lose all below 3e-4.
    matrix, rank = with_spectrum(520, 600, torch.logspace(0, -5, 520, dtype=torch.float64)), 400
    # What fp32 factors cannot hold comes on top of the optimum: one rounding of each entry.
    rounding = torch.finfo(torch.float32).eps * torch.linalg.norm(matrix).item()
    assert error(matrix, svd.truncated_svd(matrix, rank)) <= optimum(matrix, rank) * (1 + 1e-6) + rounding


@pytest.mark.parametrize("side", [64, 520])
def test_rank_deficient_matrix_keeps_orthonormal_vectors(side):
    matrix = with_spectrum(side, side + 80, torch.linspace(2, 1, 10, dtype=torch.float64))
    u, s, vh = svd.truncated_svd(matrix, 16)
    assert error(matrix, (u, s, vh)) < 1e-5
    torch.testing.assert_close(u.T @ u, torch.eye(16), rtol=0, atol=1e-5)
    torch.testing.assert_close(vh @ vh.T, torch.eye(16), rtol=0, atol=1e-5)


# The last three run through the Gram matrix, and the last one through Lanczos' method before.
@pytest.mark.parametrize(
    ("n", "m", "values", "rank"),
    [
        (30, 40, [5.0, 4, 3], 8),
        (40, 30, [5.0, 4, 3, 3, 3, 1], 5),  # two of three equal values
        (30, 30, [1.0] * 30, 9),
        (530, 520, [2.0, 1.5, *[1.0] * 500], 40),
        (520, 530, [3.0, 2], 30),
        (520, 530, [3.0, 2, 2, 2, 1], 6),
    ],
)
@pytest.mark.filterwarnings("error")
def test_rounding_chooses_no_singular_vector(n, m, values, rank):
    u, v = (torch.linalg.qr(torch.randn(side, len(values), dtype=torch.float64)).Q for side in (n, m))
    matrix = (u * torch.tensor(values, dtype=torch.float64)) @ v.T
    other = matrix * (1 + 1e-15 * torch.randn(n, m, dtype=torch.float64))
    first, second = svd.truncated_svd(matrix, rank), svd.truncated_svd(other, rank)
    signs = (first[0] * second[0]).sum(dim=0).sign()
    torch.testing.assert_close(first[0], second[0] * signs, rtol=0, atol=1e-8)
    torch.testing.assert_close(first[2], second[2] * signs[:, None], rtol=0, atol=1e-8)
    assert error(matrix, first) <= optimum(matrix, rank) + 1e-9
    for vectors in (first[0].T, first[2]):
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(rank).double(), rtol=0, atol=1e-9)
