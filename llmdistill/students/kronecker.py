"""Nearest Kronecker products: W ≈ Σ A_i ⊗ B_i by the SVD of a rearranged matrix (KroneckerBERT §3.2).

Letters: W (m, n) as in nn.Linear and in the paper, y = W x with n inputs and m outputs; A_i (m1, n1) and B_i (m2, n2)
with m = m1 m2 and n = n1 n2; `sums` is the number of products that are added.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from torch import Tensor

from llmdistill.errors import UserError
from llmdistill.students.svd import leading_svd, place_sigma


class KroneckerShape(NamedTuple):
    """Size of the first factors A (m1, n1), and the number of products; the size of B follows from the matrix."""

    m1: int
    n1: int
    sums: int = 1

    def __str__(self) -> str:
        return f"{self.m1}x{self.n1}"

    @property
    def transposed(self) -> KroneckerShape:
        """The shape for Wᵀ that gives the same products: (A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ."""
        return KroneckerShape(self.n1, self.m1, self.sums)


def parse_kronecker(text: str, sums: int = 1, *, key: str = "shape") -> KroneckerShape:
    """Parse "384x48" as the shape of an A with 384 rows and 48 columns.

    Raises UserError, which names the setting by `key`, for another form, a 0, or fewer than one product.
    """
    match = re.fullmatch(r"\s*(\d{1,9})[x×](\d{1,9})\s*", text)
    m1, n1 = (int(match[1]), int(match[2])) if match is not None else (0, 0)
    if m1 < 1 or n1 < 1:
        raise UserError(
            f"{key} {text!r} is no shape of a first Kronecker factor: write its rows and columns, such as 384x48"
        )
    if sums < 1:
        raise UserError(f"sums is {sums}: give 1 or more Kronecker products")
    return KroneckerShape(m1, n1, sums)


def check_shape(shape: KroneckerShape, m: int, n: int, *, where: str) -> None:
    """Raise a UserError if a shape does not fit a matrix (m, n), with the divisors of the side, or the most sums."""
    for number, side, what in ((shape.m1, m, "rows"), (shape.n1, n, "columns")):
        if number < 1 or side % number:
            raise UserError(
                f"{where}: a first factor of {number} {what} does not divide the {side} {what} of a {m}×{n} matrix "
                f"(outputs × inputs); take one of {', '.join(map(str, divisors(side)))}"
            )
    most = most_sums(m, n, shape)
    if not 1 <= shape.sums <= most:
        raise UserError(
            f"{where}: {shape.sums} sums do not fit a first factor {shape} of a {m}×{n} matrix: give 1 to "
            f"{most}, with the last of which the product is exact"
        )


def most_sums(m: int, n: int, shape: KroneckerShape) -> int:
    """Return the number of products that represents W (m, n) exactly: min(m1 n1, m2 n2)."""
    first = shape.m1 * shape.n1
    return min(first, m * n // first)


def second_factor(m: int, n: int, shape: KroneckerShape) -> tuple[int, int]:
    """Return the rows m2 and columns n2 of the second factors of a matrix (m, n)."""
    return m // shape.m1, n // shape.n1


def rearrange(weight: Tensor, shape: KroneckerShape) -> Tensor:
    """Return R(W) of eq. 3, (m1 n1, m2 n2), with a row for each block of m2 × n2; R of a product A ⊗ B has rank one."""
    m1, n1, _ = shape
    m2, n2 = second_factor(weight.shape[0], weight.shape[1], shape)
    # W[i1 m2 + i2, j1 n2 + j2] -> R[i1 n1 + j1, i2 n2 + j2]: block (i1, j1) of W is a row of R.
    return weight.reshape(m1, m2, n1, n2).transpose(1, 2).reshape(m1 * n1, m2 * n2)


def nearest_kronecker(weight: Tensor, shape: KroneckerShape) -> tuple[Tensor, Tensor]:
    """Return A (sums, m1, n1) and B (sums, m2, n2) of the sum of products nearest to W (KroneckerBERT eq. 2-5).

    The approximation is optimal in Frobenius norm; the products are in descending order of size, with √σ in both
    factors. `weight` may have any float type, layout and device; the result is fp32 (fp64 for fp64) on the same device.
    """
    (m, n), (m1, n1, sums) = weight.shape, shape
    m2, n2 = second_factor(m, n, shape)
    # Few singular values are needed and one side of R is often short, so its Gram matrix is cheaper than a full SVD.
    a, b = place_sigma(*leading_svd(rearrange(weight, shape), sums), "balanced")
    return a.T.reshape(sums, m1, n1), b.reshape(sums, m2, n2)


def product_flops(m: int, n: int, shape: KroneckerShape) -> tuple[int, int]:
    """Return the FLOPs of y = (A ⊗ B) x for one x (n,), with B first and with A first: the two sides of eq. 7's min."""
    m1, n1, _ = shape
    m2, n2 = second_factor(m, n, shape)
    return (
        # An inner product of length k takes 2 k - 1 FLOPs: k multiplications and k - 1 additions.
        (2 * n2 - 1) * m2 * n1 + (2 * n1 - 1) * m2 * m1,
        (2 * n1 - 1) * n2 * m1 + (2 * n2 - 1) * m2 * m1,
    )


def kronecker_flops(m: int, n: int, shape: KroneckerShape) -> int:
    """Return the FLOPs of y = Σ (A_i ⊗ B_i) x for one x (n,): eq. 7 for each product, and (sums - 1) m additions."""
    return shape.sums * min(product_flops(m, n, shape)) + (shape.sums - 1) * m


def dense_flops(m: int, n: int) -> int:
    """Return the FLOPs of y = W x for one x (n,), counted as in eq. 7: (2 n - 1) m."""
    return (2 * n - 1) * m


def kronecker_params(m: int, n: int, shape: KroneckerShape) -> int:
    """Return the number of parameters of the factors, without bias."""
    m2, n2 = second_factor(m, n, shape)
    return shape.sums * (shape.m1 * shape.n1 + m2 * n2)


def suits_matrix_units(m: int, n: int, shape: KroneckerShape) -> bool:
    """Return whether a GPU's kernels for bf16 multiply the larger factor at full speed: its sides are multiples of 8.

    It is multiplied with all tokens as one matrix. In matrices with a side below 256 any factor will do, as for ranks.
    """
    larger = max(second_factor(m, n, shape), (shape.m1, shape.n1), key=math.prod)
    return min(m, n) < 256 or all(side % 8 == 0 for side in larger)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
