"""The truncated SVD against torch.linalg.svd in fp64."""

from __future__ import annotations

import pytest
import torch

from llmdistill.factorize import svd


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
@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (520, 2500), (2500, 520), (530, 530)])
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
