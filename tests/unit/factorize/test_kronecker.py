"""Nearest Kronecker products and truncated SVDs against np.kron, eq. 3 and the singular values that they leave out."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from llmdistill.factorize import svd
from llmdistill.factorize.kronecker import KroneckerShape, nearest_kronecker, rearrange


def kron_sum(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return np.sum([np.kron(one, other) for one, other in zip(a.double().numpy(), b.double().numpy(), strict=True)], 0)


def test_rearrangement_is_that_of_equation_3() -> None:
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
def test_no_other_products_are_nearer(size, shape, dtype, monkeypatch) -> None:
    monkeypatch.setattr(svd, "CHUNK_ELEMENTS", 2**14)
    (m, n), (m1, n1, sums) = size, shape
    weight = torch.randn(size).to(dtype)
    a, b = nearest_kronecker(weight.T.contiguous().T, shape)
    assert a.dtype == b.dtype == torch.float32
    assert (a.shape, b.shape) == ((sums, m1, n1), (sums, m // m1, n // n1))
    torch.testing.assert_close(a.flatten(1).norm(dim=1), b.flatten(1).norm(dim=1))  # √σ in both (eq. 4, 5)
    missed = np.linalg.norm(weight.double().numpy() - kron_sum(a, b))
    assert missed <= optimum(rearrange(weight, shape), sums) * (1 + 1e-6) + 1e-6 * float(weight.norm())


def test_lanczos_and_the_full_decomposition_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(576, 576)
    found = kron_sum(*nearest_kronecker(weight, KroneckerShape(24, 24, 3)))
    eigsh = Mock(side_effect=svd.ArpackError(-9999))
    monkeypatch.setattr(svd, "eigsh", eigsh)
    np.testing.assert_allclose(kron_sum(*nearest_kronecker(weight, KroneckerShape(24, 24, 3))), found, atol=1e-5)
    eigsh.assert_called()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [KroneckerShape(300, 320), KroneckerShape(24, 32, 2)])
def test_cuda_input_stays_there(shape: KroneckerShape) -> None:
    weight = torch.randn(576 if shape.m1 == 24 else 600, 640, device="cuda")
    found = nearest_kronecker(weight, shape)
    assert all(factors.is_cuda for factors in found)
    own = (factors.cpu() for factors in found)
    np.testing.assert_allclose(kron_sum(*own), kron_sum(*nearest_kronecker(weight.cpu(), shape)), atol=1e-4)


# The truncated SVD.


def optimum(matrix: torch.Tensor, rank: int) -> float:
    """Eckart-Young: the root of the sum of the squared singular values that are left out."""
    return torch.linalg.svdvals(matrix.double())[rank:].square().sum().sqrt().item()


def error(matrix: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    u, s, vh = (factor.double() for factor in factors)
    return torch.linalg.norm(matrix.double() - (u * s) @ vh).item()


def with_spectrum(n: int, m: int, values: torch.Tensor) -> torch.Tensor:
    """An fp32 matrix (n, m) with those singular values."""
    u = torch.linalg.qr(torch.randn(n, len(values), dtype=torch.float64)).Q
    v = torch.linalg.qr(torch.randn(m, len(values), dtype=torch.float64)).Q
    return ((u * values) @ v.T).float()


# The first two run through the full SVD, the others through the Gram matrix, in several chunks of columns.
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (520, 2500), (2500, 520)])
def test_error_is_the_optimum(shape: tuple[int, int]) -> None:
    matrix, rank = torch.randn(shape), 40
    factors = svd.truncated_svd(matrix, rank)
    assert error(matrix, factors) <= optimum(matrix, rank) * (1 + 1e-6)
    for got, wanted in zip(factors, [(shape[0], rank), (rank,), (rank, shape[1])], strict=True):
        assert got.shape == wanted
        assert got.dtype == torch.float32


def test_steep_spectrum_is_resolved() -> None:
    # Singular values from 1 to 1e-5: an fp32 Gram matrix would lose all below 3e-4.
    matrix, rank = with_spectrum(520, 600, torch.logspace(0, -5, 520, dtype=torch.float64)), 400
    # What fp32 factors cannot hold comes on top of the optimum: one rounding of each entry.
    rounding = torch.finfo(torch.float32).eps * torch.linalg.norm(matrix).item()
    assert error(matrix, svd.truncated_svd(matrix, rank)) <= optimum(matrix, rank) * (1 + 1e-6) + rounding


@pytest.mark.parametrize("side", [64, 520])
def test_rank_deficient_matrix_keeps_orthonormal_vectors(side: int) -> None:
    matrix = with_spectrum(side, side + 80, torch.linspace(2, 1, 10, dtype=torch.float64))
    u, s, vh = svd.truncated_svd(matrix, 16)
    assert error(matrix, (u, s, vh)) < 1e-5
    torch.testing.assert_close(u.T @ u, torch.eye(16), rtol=0, atol=1e-5)
    torch.testing.assert_close(vh @ vh.T, torch.eye(16), rtol=0, atol=1e-5)
