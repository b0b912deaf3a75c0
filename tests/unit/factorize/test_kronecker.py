"""The nearest Kronecker product against np.kron, eq. 3's own definition and the singular values that it leaves out."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from llmdistill.factorize import svd
from llmdistill.factorize.kronecker import KroneckerShape, nearest_kronecker, rearrange

# Sizes of W, of A, and products: square, wide and tall; A thin, B thin, neither; A a column and B a row, as in SVD.
CASES = [
    ((12, 10), KroneckerShape(4, 5)),
    ((12, 10), KroneckerShape(3, 2, 2)),
    ((6, 30), KroneckerShape(2, 3, 3)),
    ((30, 6), KroneckerShape(15, 1)),
    ((8, 9), KroneckerShape(8, 1, 2)),
    ((9, 8), KroneckerShape(1, 8, 2)),
    ((8, 8), KroneckerShape(8, 8)),
]


def kron_sum(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return np.sum([np.kron(one, other) for one, other in zip(a.double().numpy(), b.double().numpy(), strict=True)], 0)


@pytest.mark.parametrize(("size", "shape"), CASES)
def test_kronecker_products_are_found_exactly(size: tuple[int, int], shape: KroneckerShape) -> None:
    m1, n1, sums = shape
    a = torch.randn(sums, m1, n1, dtype=torch.float64)
    b = torch.randn(sums, size[0] // m1, size[1] // n1, dtype=torch.float64)
    weight = torch.from_numpy(kron_sum(a, b))
    found = nearest_kronecker(weight, shape)
    assert [tuple(each.shape) for each in found] == [tuple(a.shape), tuple(b.shape)]
    np.testing.assert_allclose(kron_sum(*found), weight.numpy(), atol=1e-12)
    # √σ in both factors (eq. 4, 5).
    norms = [each.flatten(1).norm(dim=1) for each in found]
    torch.testing.assert_close(*norms)


def test_rearrangement_is_that_of_equation_3() -> None:
    """A row for each block, rank one for a Kronecker product, and the same norm."""
    weight = torch.arange(24.0).view(4, 6)
    rearranged = rearrange(weight, KroneckerShape(2, 3))
    for i in range(2):
        for j in range(3):
            block = weight[2 * i : 2 * i + 2, 2 * j : 2 * j + 2]
            assert torch.equal(rearranged[3 * i + j], block.reshape(-1))
    assert rearrange(weight, KroneckerShape(4, 3)).data_ptr() == weight.data_ptr()  # a table is not copied


# Thin either way, with more columns than are taken to fp64 at a time; and nearly square, where Lanczos' method works.
@pytest.mark.parametrize(
    ("size", "shape"), [((600, 640), KroneckerShape(300, 320)), ((600, 640), KroneckerShape(2, 2)),
                        ((576, 576), KroneckerShape(24, 24, 2))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_the_optimum_at_size(size, shape, dtype, monkeypatch) -> None:
    monkeypatch.setattr(svd, "CHUNK_ELEMENTS", 2**14)
    weight = torch.randn(size).to(dtype)
    a, b = nearest_kronecker(weight.T.contiguous().T, shape)
    assert a.dtype == b.dtype == torch.float32
    values = torch.linalg.svdvals(rearrange(weight, shape).double())
    optimum = values[shape.sums :].square().sum().sqrt()
    error = np.linalg.norm(weight.double().numpy() - kron_sum(a, b))
    assert error <= float(optimum) * (1 + 1e-6)


def test_lanczos_and_the_full_decomposition_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(576, 576)
    found = kron_sum(*nearest_kronecker(weight, KroneckerShape(24, 24, 3)))
    eigsh = Mock(side_effect=svd.ArpackError(-9999))
    monkeypatch.setattr(svd, "eigsh", eigsh)
    np.testing.assert_allclose(kron_sum(*nearest_kronecker(weight, KroneckerShape(24, 24, 3))), found, atol=1e-5)
    eigsh.assert_called()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [KroneckerShape(300, 320), KroneckerShape(2, 2), KroneckerShape(24, 32, 2)])
def test_cuda_input_stays_there(shape: KroneckerShape) -> None:
    weight = torch.randn(600, 640, device="cuda")
    if shape.m1 == 24:
        weight = weight[:576]
    a, b = nearest_kronecker(weight, shape)
    assert a.is_cuda
    assert b.is_cuda
    np.testing.assert_allclose(kron_sum(a.cpu(), b.cpu()), kron_sum(*nearest_kronecker(weight.cpu(), shape)), atol=1e-4)
