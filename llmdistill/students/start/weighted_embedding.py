"""Low-rank token embeddings weighted by how often tokens occur, by gradients, and by the use as a tied head.

An error δ_v in row v of the table E (V, d) costs ½ a_v δ_v G δ_vᵀ / tokens² where the table is looked up: a_v is the
number of times that token v occurs, and G = Σ g gᵀ over the gradients at the table's output. A head tied to the table
adds ½ b_v δ_v C δ_vᵀ / tokens², with C = Σ h hᵀ over the head's inputs and b_v = Σ p_v (1 − p_v), the diagonal of the
logits' Fisher matrix. `table_moments` measures all four.

One such form has the closed solution of a weighted SVD, for all ranks at once. The sum of two has none: the SVD for a
product of rows and columns that is near to it costs 1 to 7 % more than A and B that are then improved in turn. Each
half-step is exact and cheap: for two symmetric positive matrices P and Q there is a basis in which both are diagonal,
and in these bases the normal equations of all rows, or of B, fall apart into single numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmdistill.errors import UserError
from llmdistill.progress import progress
from llmdistill.students.kinds import Sigma
from llmdistill.students.start.table_moments import TableMoments
from llmdistill.students.start.weighted import add_ridge
from llmdistill.students.svd import determine_vectors, place_sigma, truncated_svd

# So large because answers hang on rare names, which the weights otherwise give up for frequent tokens.
ROW_DAMPING = 0.3
"""Added to the row weights, as a share of their mean, so that tokens that the data do not show keep a weight."""
COLUMN_DAMPING = 1e-3
"""Added to the diagonals of G and C, as a share of their mean."""
ROUNDS, LEAST_GAIN = 30, 1e-4
"""Rounds of alternating least squares at most, and the share of the cost that a round must save for another one."""
_RIDGE = 1e-12
"""Keeps factors of a table whose own rank is lower solvable, as a share of the mean diagonal."""


@dataclass(frozen=True)
class _QuadraticForm:
    """Σ_v rows_v δ_v columns δ_vᵀ over the rows δ of an error (V, d), in fp64."""

    rows: Tensor
    columns: Tensor

    def at(self, error: Tensor) -> float:
        return float(self.rows @ ((error @ self.columns) * error).sum(dim=1))


@dataclass(frozen=True, kw_only=True)
class WeightedTable:
    """The low-rank factors of a token embedding."""

    left: Tensor
    """A (V, k)."""
    right: Tensor
    """B (k, d)."""
    losses: tuple[float, ...]
    """The cost per token of each rank from 0 to k; see `students.start.weighted.WeightedSVD.costs`."""
    tokens: int
    """The number of tokens of the calibration data."""

    @property
    def shape(self) -> tuple[int, int]:
        """Vocabulary V and width d."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def widest(self) -> int:
        """The width d, as the rows of the table count one by one."""
        return self.right.shape[1]

    @property
    def rank(self) -> int:
        return len(self.right)

    @property
    def cost(self) -> float:
        """The cost of this rank per token."""
        return self.losses[self.rank]

    def leading(self, rank: int) -> WeightedTable:
        return replace(self, left=self.left[:, :rank], right=self.right[:rank], losses=self.losses[: rank + 1])

    def times(self, ratio: float, power: float = 1.0) -> WeightedTable:
        """Return the same factors at costs of ratio · cost^power."""
        return replace(self, losses=tuple(ratio * loss**power for loss in self.losses))

    def parameters(self, rank: int, sigma: Sigma) -> dict[str, Tensor]:
        """Return the parameters of a LowRankEmbedding with this product, where its own SVD scales both sides."""
        assert rank == self.rank, (rank, self.right.shape)
        rows, outer = torch.linalg.qr(self.left.double())
        columns, inner = torch.linalg.qr(self.right.T.double())
        u, s, vh = torch.linalg.svd(outer @ inner.T)
        a, b = place_sigma(*determine_vectors(rows @ u, s, vh @ columns.T, rank), sigma)
        return {"A.weight": a.float(), "B.weight": b.float()}


def nested_table(table: Tensor, moments: TableMoments) -> WeightedTable:
    """Return factors of a table (V, d) of its full rank, the most valuable first, in fp32 on the device of the table.

    Without gradients the cost is half the squared error of what the lookups return. An error of the tied head's logits
    has another unit, so it counts in proportion: each use of the table by its own energy.

    Raises:
        UserError: the moments have no entry over 0.
    """
    exact = table.double()
    forms = _make_quadratic_forms(exact, moments)
    a, b = _factors_of_nearest(exact, forms, min(table.shape))
    # The error of a rank is the sum of all later factors a_i b_i, so its cost adds up their products with each other.
    products = torch.zeros(len(b), len(b), dtype=a.dtype, device=a.device)
    for form in forms:
        products += ((form.rows[:, None] * a).T @ a) * (b @ form.columns @ b.T)
    lost = products.flip(0, 1).cumsum(0).cumsum(1).diagonal().flip(0).clamp(min=0.0)
    losses = [*(lost / _scale(moments)).tolist(), 0.0]
    return WeightedTable(left=a.float(), right=b.float(), losses=tuple(losses), tokens=moments.tokens)


def weighted_table(table: Tensor, moments: TableMoments, rank: int) -> WeightedTable:
    """Return factors of a table (V, d) that cost least at this rank; see `nested_table`. Other ranks have no cost.

    Raises:
        UserError: the moments have no entry over 0.
    """
    exact = table.double()
    forms = _make_quadratic_forms(exact, moments)
    a, b = _factors_of_nearest(exact, forms, rank)
    if len(forms) > 1:
        a, b = _alternate(exact, forms, b)
    cost = sum(form.at(exact - a @ b) for form in forms) / _scale(moments)
    unknown = [math.nan] * rank
    return WeightedTable(left=a.float(), right=b.float(), losses=(*unknown, cost), tokens=moments.tokens)


def _scale(moments: TableMoments) -> int:
    # With gradients the Fisher matrix of the tokens' sum is a product of two sums over tokens, divided by their number.
    return 2 * moments.tokens ** (1 if moments.gradients is None else 2)


def _factors_of_nearest(exact: Tensor, forms: list[_QuadraticForm], rank: int) -> tuple[Tensor, Tensor]:
    """Return the best A (V, k) and B (k, d) for the product of row and column weights that is nearest to the forms: it
    has the row sums and the mean matrix of their sum."""
    scales = [form.columns.diagonal().mean() for form in forms]
    totals = [form.rows.sum() for form in forms]
    rows_V = torch.stack([scale * form.rows for scale, form in zip(scales, forms, strict=True)]).sum(0)
    columns = torch.stack([total * form.columns for total, form in zip(totals, forms, strict=True)]).sum(0)
    root, rows = torch.linalg.cholesky(columns / columns.diagonal().mean()), rows_V.sqrt()[:, None]
    u, s, vh = truncated_svd(rows * (exact @ root), rank)
    return u * s / rows, torch.linalg.solve_triangular(root, vh, upper=False, left=False)


def _make_quadratic_forms(table: Tensor, moments: TableMoments) -> list[_QuadraticForm]:
    """Return the damped forms for a table in fp64: one for the lookups, and one for a tied head."""
    vocabulary, width = table.shape
    ones, identity = table.new_ones(vocabulary), torch.eye(width, dtype=table.dtype, device=table.device)

    def damped_rows(weights: Tensor) -> Tensor:
        exact = _check_positive(weights.to(table))
        return exact + ROW_DAMPING * exact.mean()

    def damped_columns(moment: Tensor) -> Tensor:
        return add_ridge(_check_positive(moment.to(table)), COLUMN_DAMPING)

    lookups = damped_rows(moments.counts)
    if moments.head_inputs is None:
        return [_QuadraticForm(lookups, identity if moments.gradients is None else damped_columns(moments.gradients))]
    inputs = damped_columns(moments.head_inputs)
    if moments.gradients is not None and moments.head_outputs is not None:
        return [
            _QuadraticForm(lookups, damped_columns(moments.gradients)),
            _QuadraticForm(damped_rows(moments.head_outputs), inputs),
        ]
    # Each is divided by what it gives for the whole table, up to a common factor, so that both uses count alike.
    lookup_form, head_form = _QuadraticForm(lookups, identity), _QuadraticForm(ones, inputs)
    return [lookup_form, _QuadraticForm(lookup_form.at(table) / head_form.at(table) * ones, inputs)]


def _check_positive(moment: Tensor) -> Tensor:
    if not moment.abs().sum() > 0:
        raise UserError(
            "the calibration data give the token embedding no token or no gradient at all: name other data, or leave "
            "weighting out"
        )
    return moment


def _alternate(table: Tensor, forms: list[_QuadraticForm], b: Tensor) -> tuple[Tensor, Tensor]:
    """Minimize the sum of two forms by alternating least squares, from B on; no half-step raises the cost."""
    # Scaled so that both matrices have the same trace, because their sum is decomposed.
    (p, g), (q, c) = ((form.rows * form.columns.trace(), form.columns / form.columns.trace()) for form in forms)
    # G and C do not change between rounds, P and Q do.
    outer, column_shares = _diagonalize_both(g, c)
    energy = sum(form.at(table) for form in forms)
    before = energy
    for _ in progress(range(ROUNDS), "Factorizing the embedding", "rounds at most"):
        # Row v of A solves A_v (p_v B G Bᵀ + q_v B C Bᵀ) = E_v (p_v G + q_v C) Bᵀ.
        basis, shares = _diagonalize_both(b @ g @ b.T, b @ c @ b.T)
        rows = p[:, None] * (table @ (g @ b.T @ basis)) + q[:, None] * (table @ (c @ b.T @ basis))
        a = rows / (p[:, None] * (1 - shares) + q[:, None] * shares) @ basis.T
        # B solves P B G + Q B C = Y, with P = Aᵀ diag(p) A, Q = Aᵀ diag(q) A.
        weighted_p, weighted_q = (p[:, None] * a).T, (q[:, None] * a).T
        basis, shares = _diagonalize_both(weighted_p @ a, weighted_q @ a)
        right = (weighted_p @ table) @ g + (weighted_q @ table) @ c
        divisors = (1 - shares)[:, None] * (1 - column_shares) + shares[:, None] * column_shares
        b = basis @ (basis.T @ right @ outer / divisors) @ outer.T
        cost = energy - float((right * b).sum())  # B is the minimum for this A
        # A and B of the last round are kept, as no half-step raises the cost.
        if cost > before * (1 - LEAST_GAIN):
            break
        before = cost
    return a, b


def _diagonalize_both(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return X and λ from 0 to 1 with Xᵀ (P + Q) X = 1 and Xᵀ Q X = diag(λ), so that Xᵀ P X = diag(1 − λ)."""
    root = torch.linalg.cholesky(add_ridge(p + q, _RIDGE))
    # L⁻¹ Q L⁻ᵀ with L Lᵀ = P + Q, one side at a time; Q is symmetric.
    half = torch.linalg.solve_triangular(root, q, upper=False)
    whitened = torch.linalg.solve_triangular(root, half.T, upper=False)
    # eigh reads one triangle; the mean removes the asymmetry that two triangular solves leave.
    shares, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    return torch.linalg.solve_triangular(root.T, vectors, upper=True), shares.clamp(0.0, 1.0)
