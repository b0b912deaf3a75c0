"""The forms in which a product of a low rank is stored: two plain factors, or pivoted ones with fewer numbers.

Of the m outputs of a product of rank k, k can be chosen (the pivots) of which all others are combinations. Then one
factor has the pivots' own rows, (k, n), and the other the combinations, (m - k, k): k (m + n - k) numbers in place of
k (m + n), for the same product (PIFA, arXiv 2501.19090).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmdistill.config.student import Form

LARGEST_WEIGHT = 2.0
"""Pivots are exchanged until no other output takes more than this share of one of them."""

DIRECTION_FLOOR = 1e-9
"""Added to the moment of the outputs in each direction, as a share of its mean."""


def factor_params(m: int, n: int, rank: int, form: Form = "plain") -> int:
    """Return the number of parameters of an (m, n) matrix of a rank, which stays dense if that is not more."""
    if rank > largest_rank(m, n, form):
        return m * n
    return rank * (m + n) if form == "plain" else rank * (m + n - rank)


def largest_rank(m: int, n: int, form: Form = "plain") -> int:
    """Return the largest rank whose factors have fewer numbers than the (m, n) matrix; 0 if there is none."""
    return (m * n - 1) // (m + n) if form == "plain" else min(m, n) - 1


def pivoted(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn the parameters of a LowRankLinear into those of the PivotedLinear with the same product.

    Args:
        factors: "A.weight" (k, n) and "B.weight" (m, k), of linearly independent columns, with k < m.

    Returns:
        "A.weight" (k, n), "B.weight" (m - k, k), both in the dtype of the factors, and "order" (m,).
    """
    a, b = factors["A.weight"], factors["B.weight"]
    basis, inner = torch.linalg.qr(b.double())
    outputs = inner @ a.double()
    rows, weights = _pivots(basis, outputs)
    others = torch.ones(len(b), dtype=torch.bool, device=b.device)
    others[rows] = False
    order = torch.empty(len(b), dtype=torch.int64, device=b.device)
    order[torch.cat([rows, others.nonzero()[:, 0]])] = torch.arange(len(b), device=b.device)
    return {"A.weight": (basis[rows] @ outputs).to(a), "B.weight": weights[others].to(b), "order": order}


def _pivots(basis: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (k,) of the product of an orthonormal basis (m, k) and (k, n), and the weights (m, k) that give all rows.

    QR with column pivoting takes the rows that are longest beside those it has taken: students with such pivots train
    better than with others. It gives no bound on the weights. So while a row takes more than LARGEST_WEIGHT of a pivot
    it takes its place, which multiplies the volume of the pivots by this weight, so that the exchange ends.
    """
    from scipy.linalg import qr  # torch has no QR with pivoting

    moment = outputs @ outputs.T
    # Directions without outputs, of which a matrix of a lower rank has some, count a little: all rows are independent.
    floor = DIRECTION_FLOOR * moment.diagonal().mean() if moment.any() else 1.0
    lengths = torch.linalg.cholesky(moment + floor * torch.eye(len(moment), dtype=moment.dtype, device=moment.device))
    _, order = qr((basis @ lengths).T.cpu().numpy(), mode="r", pivoting=True)
    rows = torch.from_numpy(order[: basis.shape[1]].astype("int64")).to(basis.device)
    weights = torch.linalg.solve(basis[rows], basis, left=False)
    while True:
        row, pivot = divmod(int(weights.abs().argmax()), weights.shape[1])
        if not weights[row, pivot].abs() > LARGEST_WEIGHT:
            return rows, weights
        change = weights[row].clone()
        change[pivot] -= 1
        weights -= torch.outer(weights[:, pivot] / weights[row, pivot], change)
        rows[pivot] = row
