"""Sums of Kronecker products nearest to a matrix in the norm of second moments, by alternating least squares.

The error Δ = W − Σ A_i ⊗ B_i costs ½ tr(Δᵀ G Δ C), as in `students.start.weighted`. If the moments were products
themselves, G = G_a ⊗ G_b and C = C_a ⊗ C_b, the best sum would follow from the SVD of a rearranged matrix, as it does
without weights. They are not, so the nearest products of the moments give one of two initial guesses, and the
preconditioner of conjugate gradients, which improve A and B in turn. No step makes the cost larger, and no matrix is
larger than W, G or C.

Letters as in `students.kronecker`: W (m, n), A (sums, m1, n1), B (sums, m2, n2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from llmdistill.students.kinds import Sigma
from llmdistill.students.kronecker import KroneckerShape, nearest_kronecker, second_factor
from llmdistill.students.start.moments import Moments
from llmdistill.students.start.weighted import GRADIENT_DAMPING, INPUT_DAMPING, add_ridge, damp

ROUNDS, STEPS, LEAST_GAIN = 12, 10, 1e-2
"""Rounds of A and B at most, steps of conjugate gradients in each half of a round, and the share of the cost that a
round must save for another one."""
_RIDGE = 1e-8
"""Keeps the preconditioner positive, as a share of the mean diagonal; it does not change what is solved."""


@dataclass(frozen=True, kw_only=True)
class WeightedKronecker:
    """The factors of a matrix."""

    a: Tensor
    """A (sums, m1, n1)."""
    b: Tensor
    """B (sums, m2, n2)."""
    cost: float
    """The cost of the approximation per token; see `students.start.weighted.WeightedSVD.costs`."""
    tokens: int
    """The number of tokens of the calibration data."""

    def to(self, device: torch.device) -> WeightedKronecker:
        return replace(self, a=self.a.to(device), b=self.b.to(device))

    @property
    def widest(self) -> int:
        return max(self.a.shape[1] * self.b.shape[1], self.a.shape[2] * self.b.shape[2])

    def parameters(self, shape: KroneckerShape, _sigma: Sigma) -> dict[str, Tensor]:
        """Return the parameters of a KroneckerLinear; the two factors of a product have the same norm."""
        assert tuple(shape) == (*self.a.shape[1:], len(self.a)), (shape, self.a.shape)
        # Two factors of zero, of a product that adds nothing, must not become NaN.
        norm_a, norm_b = (factor.flatten(1).norm(dim=1).clamp(min=1e-30)[:, None, None] for factor in (self.a, self.b))
        return {"A": self.a * (norm_b / norm_a).sqrt(), "B": self.b * (norm_a / norm_b).sqrt()}


def weighted_kronecker(weight: Tensor, moments: Moments, shape: KroneckerShape) -> WeightedKronecker:
    """Return the factors for a weight (m, n) with a low cost, in fp32 on the device of the weight.

    They cost no more than the factors that are nearest without weights. Sums of products have no closed-form optimum,
    so others may cost less.

    Raises:
        UserError: the moments have no entry over 0.
    """
    exact = weight.double()
    inputs = damp(moments.inputs.to(weight.device), INPUT_DAMPING)[0]
    outputs = None if moments.gradients is None else damp(moments.gradients.to(weight.device), GRADIENT_DAMPING)[0]

    def metric(change: Tensor) -> Tensor:
        product = change @ inputs
        return product if outputs is None else outputs @ product

    m2, _ = second_factor(weight.shape[0], weight.shape[1], shape)
    # Without gradients G is the identity, which is the product of two identities exactly.
    identity = partial(torch.eye, dtype=exact.dtype, device=exact.device)
    output_sides = (identity(shape.m1), identity(m2)) if outputs is None else _find_nearest_product(outputs, shape.m1)
    input_sides = _find_nearest_product(inputs, shape.n1)
    sides, swapped = (output_sides, input_sides), (output_sides[::-1], input_sides[::-1])
    guesses = (nearest_kronecker(exact, shape), _guess_by_whitening(sides, exact, shape))
    errors = ((a, b, exact - _sum_products(a, b)) for a, b in guesses)
    states = (_State(a=a, b=b, error=error, image=metric(error), metric=metric) for a, b, error in errors)
    best = min(states, key=lambda state: state.cost)
    cost = best.cost
    for _ in range(ROUNDS):
        best = _improve(_improve(best, sides).swapped(), swapped).swapped()
        if best.cost > cost * (1 - LEAST_GAIN):
            break
        cost = best.cost
    power = 1 if moments.gradients is None else 2
    return WeightedKronecker(
        a=best.a.float(), b=best.b.float(), cost=best.cost / (2 * moments.tokens**power), tokens=moments.tokens
    )


_Sides = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""((G_a, G_b), (C_a, C_b)), the nearest products of the moments: G ≈ G_a ⊗ G_b and C ≈ C_a ⊗ C_b."""


@dataclass(frozen=True, kw_only=True)
class _State:
    """Factors, and what follows from them: the error Δ and G Δ C, both (m, n) in fp64."""

    a: Tensor
    b: Tensor
    error: Tensor
    image: Tensor
    metric: Callable[[Tensor], Tensor]
    """Maps Δ to G Δ C."""
    a_first: bool = True
    """Whether the products are A ⊗ B; else they are B ⊗ A."""

    @property
    def cost(self) -> float:
        """tr(Δᵀ G Δ C)."""
        return float((self.error * self.image).sum())

    def swapped(self) -> _State:
        """Return the state with A and B exchanged, so that code that improves A improves B."""
        return replace(self, a=self.b, b=self.a, a_first=not self.a_first)

    def product(self, a: Tensor) -> Tensor:
        """Σ a_i ⊗ B_i, (m, n)."""
        return _sum_products(a, self.b) if self.a_first else _sum_products(self.b, a)

    def contracted(self, image: Tensor) -> Tensor:
        """Apply the adjoint of `product`: (m, n) -> the shape of A."""
        (_, m1, n1), (_, m2, n2) = self.a.shape, self.b.shape
        if self.a_first:
            return torch.einsum("ikjl,skl->sij", image.reshape(m1, m2, n1, n2), self.b)
        return torch.einsum("kilj,skl->sij", image.reshape(m2, m1, n2, n1), self.b)


def _improve(state: _State, sides: _Sides) -> _State:
    """Improve A for this B by conjugate gradients on the least squares problem; each step lowers the cost."""
    # The preconditioner is the inverse of the normal equations' matrix if the moments were their nearest products:
    # S ⊗ G_a ⊗ C_a with S_ij = tr(B_iᵀ G_b B_j C_b).
    (g_a, g_b), (c_a, c_b) = sides
    s = torch.einsum("ikl,jkl->ij", state.b, g_b @ state.b @ c_b)
    sums_root, left_root, right_root = (torch.linalg.cholesky(add_ridge(factor, _RIDGE)) for factor in (s, g_a, c_a))

    def solve(residual: Tensor) -> Tensor:
        mixed = torch.cholesky_solve(residual.flatten(1), sums_root).reshape(residual.shape)
        return torch.cholesky_solve(torch.cholesky_solve(mixed, left_root).mT, right_root).mT

    a, error, image = state.a, state.error, state.image
    # Half the negative gradient of the cost at A; `image` is G Δ C.
    residual = state.contracted(image)
    direction = solve(residual)
    # The residual's square in the norm of the preconditioner
    size = float((residual * direction).sum())
    for _ in range(STEPS):
        moved = state.product(direction)
        weighted = state.metric(moved)
        curvature = float((moved * weighted).sum())
        if not (size > 0 and curvature > 0):  # A is the solution already
            break
        step = size / curvature
        a, error, image = a + step * direction, error - step * moved, image - step * weighted
        residual = state.contracted(image)
        scaled = solve(residual)
        # The next direction is conjugate to all earlier ones.
        before, size = size, float((residual * scaled).sum())
        direction = scaled + size / before * direction
    return replace(state, a=a, error=error, image=image)


def _guess_by_whitening(sides: _Sides, weight: Tensor, shape: KroneckerShape) -> tuple[Tensor, Tensor]:
    """Return the factors that would be best if the moments were their nearest products, by whitening W with these."""
    (r_a, r_b), (l_a, l_b) = (
        tuple(torch.linalg.cholesky(add_ridge(factor, _RIDGE)) for factor in pair) for pair in sides
    )
    # (m1, m2, n1, n2)
    blocks = weight.reshape(shape.m1, len(r_b), shape.n1, len(l_b))
    whitened = torch.einsum("ikjl,ip,kq,jr,lt->pqrt", blocks, r_a, r_b, l_a, l_b).reshape(weight.shape)

    def unwhitened(factor: Tensor, left: Tensor, right: Tensor) -> Tensor:
        solved = torch.linalg.solve_triangular(left.T, factor, upper=True)
        return torch.linalg.solve_triangular(right, solved, upper=False, left=False)

    a, b = nearest_kronecker(whitened, shape)
    return unwhitened(a, r_a, l_a), unwhitened(b, r_b, l_b)


def _find_nearest_product(moment: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the Kronecker product nearest to a positive matrix: two positive factors, the first one (side, side)."""
    a, b = nearest_kronecker(moment, KroneckerShape(side, side))
    sign = a[0].trace().sign()
    # Both factors may come out negative, as the signs cancel, and not quite symmetric; Cholesky needs positive ones.
    first, second = ((factor[0] + factor[0].T) * (sign / 2) for factor in (a, b))
    return first, second


def _sum_products(a: Tensor, b: Tensor) -> Tensor:
    (_, m1, n1), (_, m2, n2) = a.shape, b.shape
    # (m1, m2, n1, n2) -> (m, n), with an element of A for each block of B's size
    return torch.einsum("sij,skl->ikjl", a, b).reshape(m1 * m2, n1 * n2)
