"""Truncated SVD through the Gram matrix (MaKD eq. 10-11), and the forms in which a product of a low rank is stored.

The decomposition is as good as the full SVD and for wide matrices several times faster; tall ones torch reduces by QR
first, in about our time (scripts/bench/bench_factorize.py).

A product is stored as two plain factors, or as pivoted ones with fewer numbers. Of the m outputs of a product of rank
k, k can be chosen (the pivots) of which all others are combinations. Then one factor has the pivots' own rows, (k, n),
and the other the combinations, (m - k, k): k (m + n - k) numbers in place of k (m + n), for the same product (PIFA,
arXiv 2501.19090).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from scipy.linalg import qr
from scipy.sparse.linalg import ArpackError, eigsh
from torch import Tensor

from llmdistill.config.student import FactorForm, RankMultiple

FULL_SVD_SIDE = 512
"""A matrix whose smaller side is at most this uses the full SVD in fp64, which is fast enough at this size."""
SMALLEST_RATIO = 1e-6
"""The Gram matrix squares the singular values, so fp64 loses those under about 1e-8 of the largest. If a kept
singular value is below this share of the largest, the full SVD is used."""
CHUNK = 2048
"""Smallest number of columns converted to fp64 at a time, so that no embedding has a whole copy in fp64."""
CHUNK_ELEMENTS = 2**20
"""Number of elements converted to fp64 at a time if that is more: for few rows and millions of columns."""
LANCZOS_SIDE, LANCZOS_SHARE = 256, 32
"""A larger Gram matrix of which fewer than one eigenvector in LANCZOS_SHARE is needed uses Lanczos' method on a CPU."""
CHANCE = 1e-12
"""Singular values that differ by less than this share are equal, and those below this share of the largest are zero:
the rounding of fp64, which differs between processors, chooses their vectors."""
LARGEST_WEIGHT = 2.0
"""Pivots are exchanged until no other output takes more than this share of one of them."""
DIRECTION_FLOOR = 1e-9
"""Added to the moment of the outputs in each direction, as a share of its mean."""


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best rank-k approximation as U (n, k), Σ (k), Vᵀ (k, m), singular values descending (MaKD eq. 11).

    `matrix` is (n, m), with any float type, layout and device; the result is fp32 (fp64 for an fp64 matrix) on the same
    device. U and V have orthonormal columns even if singular values are zero, so that zero directions can still be
    trained, and the same ones on every processor but for their signs (`determine_vectors`). The squared error is
    Σ_{i>k} σᵢ²; its root has a relative accuracy of 1e-6.
    """
    n, m = matrix.shape
    assert 1 <= rank <= min(n, m), (rank, n, m)
    if min(n, m) <= FULL_SVD_SIDE:
        return _stored(_full(matrix, rank), matrix)
    return leading_svd(matrix, rank)


def truncated_svds(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `truncated_svd` of each of P matrices (P, n, m), stacked: U (P, n, k), Σ (P, k), Vᵀ (P, k, m).

    On a GPU the eigenvectors of all Gram matrices come from one call, whatever their size.
    """
    if len(matrices) == 1:
        u, s, vh = truncated_svd(matrices[0], rank)
        return u[None], s[None], vh[None]
    return gram_svds(matrices, rank)


def gram_svds(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `truncated_svds` by the Gram matrices, whose values and vectors are checked on all matrices at once."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = (matrices.mT if is_tall else matrices).double()
    squares, vectors = (ascending.flip(-1) for ascending in torch.linalg.eigh(wide @ wide.mT))
    u = vectors[..., :rank]
    scaled = u.mT @ wide
    s = torch.linalg.vector_norm(scaled, dim=-1)
    # Where values are equal, or too small for a square, the rules of one matrix choose the vectors.
    leading = squares[:, : rank + 1]
    equal = (leading[:, :-1] - leading[:, 1:] <= CHANCE * leading[:, :-1]).any(-1)
    odd = equal | (s[:, -1] <= SMALLEST_RATIO * s[:, 0])
    vh = scaled / s[..., None].clamp(min=torch.finfo(s.dtype).tiny)
    factors = (vh.mT, s, u.mT) if is_tall else (u, s, vh)
    for place in odd.nonzero()[:, 0].tolist():
        for stacked, values in zip(factors, truncated_svd(matrices[place], rank), strict=True):
            stacked[place] = values
    return _stored(factors, matrices)


def leading_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `truncated_svd` does, for few singular values of a matrix with a very short side or a very long one.

    It always uses the Gram matrix of the shorter side; for 2.9 million rows of 8 this matrix has 64 entries.
    """
    n, m = matrix.shape
    assert 1 <= rank <= min(n, m), (rank, n, m)
    if n <= m:
        return _stored(_by_gram(matrix, rank), matrix)
    left, values, right = _by_gram(matrix.T, rank)
    return _stored((right.T, values, left.T), matrix)


def place_sigma(u: Tensor, s: Tensor, vh: Tensor, sigma: Literal["left", "balanced"]) -> tuple[Tensor, Tensor]:
    """Return A (n, k) and B (k, m) with A B = U Σ Vᵀ: "left" is A = UΣ, B = Vᵀ (MaKD eq. 11), "balanced" √Σ on both."""
    if sigma == "left":
        return u * s, vh
    root = s.sqrt()
    return u * root, root[:, None] * vh


def _stored(factors: tuple[Tensor, Tensor, Tensor], matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if matrix.dtype == torch.float64 else torch.float32
    u, s, vh = factors
    return u.to(dtype), s.to(dtype), vh.to(dtype)


def _full(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    return determine_vectors(u, s, vh, rank)


def determine_vectors(
    u: Tensor, s: Tensor, vh: Tensor, rank: int, *, zero: float = CHANCE
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the leading k vectors of an SVD in fp64, with those that the matrix leaves open chosen by a fixed rule.

    Equal singular values determine only the space that their vectors span together, and singular values of zero only
    that their vectors are orthogonal to all others. There a decomposition returns what rounding makes of it. The rule
    is the Gram-Schmidt process on vectors drawn from a fixed seed and projected onto the open space. A zero becomes
    the largest number that counts as zero, so that both sides can be trained where each takes its root.

    Args:
        u: (n, p), orthonormal columns; u and vh are overwritten.
        s: (p,), descending.
        vh: (p, m), orthonormal rows.
        rank: k, at most p.
        zero: singular values up to this share of the largest are zeros.
    """
    floor = zero * s[0]
    known = int((s > floor).sum())
    # Equal values stand in runs; a run ends where the next value is smaller by more than rounding explains.
    apart = (s[:-1] - s[1:] > CHANCE * s[:-1])[:known]
    ends = [place + 1 for place in apart.nonzero()[:, 0].tolist()]
    for start, end in pairwise([0, *ends, known]):
        if start < rank and end - start > 1:
            # U Uᵀ projects the draws onto the space by whatever basis U, so the result does not depend on U.
            rotation = _gram_schmidt(u[:, start:end].T @ _draw(u, end - start))
            u[:, start:end] = u[:, start:end] @ rotation
            # The values of the run are equal, so turning both sides alike leaves the product as it is.
            vh[start:end] = rotation.T @ vh[start:end]
    if known < rank:
        for side in (u, vh.T):
            open_ = _draw(side, rank - known)
            for _ in range(2):  # the second time for what rounding has left
                open_ -= side[:, :known] @ (side[:, :known].T @ open_)
            side[:, known:rank] = _gram_schmidt(open_)
    return u[:, :rank], s[:rank].clamp(min=floor), vh[:rank]


def _draw(like: Tensor, count: int) -> Tensor:
    # Drawn on the CPU: a GPU's generator gives other numbers for the same seed.
    return torch.randn(len(like), count, dtype=like.dtype, generator=torch.Generator().manual_seed(0)).to(like.device)


def _gram_schmidt(columns: Tensor) -> Tensor:
    basis, lengths = torch.linalg.qr(columns)
    return basis * lengths.diagonal().sign()  # of QR's two signs the one that the process has


def _by_gram(wide: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Truncated SVD of a matrix (n, m) with n <= m: U from the eigenvectors of W Wᵀ, then Σ Vᵀ = Uᵀ W.

    The error of the approximation U Uᵀ W depends only on the space that U spans, so the squaring of W does not affect
    the accuracy of the result.
    """
    n, m = wide.shape
    columns = max(CHUNK, CHUNK_ELEMENTS // n)
    # (n, n) of the short side: small enough for fp64, which the squares of the singular values need.
    gram = torch.zeros(n, n, dtype=torch.float64, device=wide.device)
    for chunk in wide.split(columns, dim=1):
        chunk_64 = chunk.double()
        gram.addmm_(chunk_64, chunk_64.T)
    u = _leading_eigenvectors(gram, rank)
    # Σ Vᵀ, (k, m), in the dtype of the result: fp64 would double the memory of a large table's.
    scaled = torch.empty(rank, m, dtype=torch.float64 if wide.dtype == torch.float64 else torch.float32).to(wide.device)
    # The lengths of the rows of Σ Vᵀ: roots of the Gram matrix's eigenvalues would lack the digits lost to squaring.
    squares = torch.zeros(rank, dtype=torch.float64, device=wide.device)
    for start, chunk in zip(range(0, m, columns), wide.split(columns, dim=1), strict=True):
        product = u.T @ chunk.double()
        squares += product.square().sum(dim=1)
        scaled[:, start : start + columns] = product
    s = squares.sqrt()
    if s[-1] <= SMALLEST_RATIO * s[0]:
        return _full(wide, rank)
    return u, s, scaled / s.to(scaled.dtype)[:, None]


def _leading_eigenvectors(gram: Tensor, rank: int) -> Tensor:
    """Return the eigenvectors (n, k) of the largest eigenvalues of a Gram matrix (n, n), eigenvalues descending."""
    n = len(gram)
    if gram.device.type == "cpu" and n > LANCZOS_SIDE and rank * LANCZOS_SHARE <= n:
        # ARPACK's own start vector is random, which would give each call other rounding and signs.
        start = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        try:
            values, vectors = eigsh(gram.numpy(), k=rank, which="LA", v0=start.numpy())
        except ArpackError:  # no convergence, or the matrix is zero
            pass
        else:
            # Ascending. Of equal eigenvalues the start vector would choose the vectors, not `determine_vectors`.
            if (np.diff(values) > CHANCE * values[1:]).all():
                return torch.from_numpy(vectors).flip(1)
    values, vectors = (ascending.flip(-1) for ascending in torch.linalg.eigh(gram))
    # Both sides of a symmetric matrix have the same vectors; a copy, as each side is overwritten.
    return determine_vectors(vectors, values, vectors.mT.clone(), rank)[0]


def factor_params(m: int, n: int, rank: int, form: FactorForm = "plain") -> int:
    """Return the number of parameters of an (m, n) matrix of a rank, which stays dense if that is not more."""
    if rank > largest_rank(m, n, form):
        return m * n
    return rank * (m + n) if form == "plain" else rank * (m + n - rank)


def rank_unit(m: int, n: int, rank: int, multiple: RankMultiple) -> int:
    """Return the number of which ranks near this one are multiples in an (m, n) matrix; at most the rank.

    The matrix units of a GPU multiply numbers by eights, and tiles of 64; a rank of 65 takes the time of 128. In a
    narrow matrix such steps would be too large a share of the rank.
    """
    if multiple != "auto":
        return multiple if multiple <= rank else 1
    return next(unit for unit, side in ((64, 1024), (8, 256), (1, 1)) if side <= min(m, n) and unit <= rank)


def useful_ranks(m: int, n: int, multiple: RankMultiple = 1, form: FactorForm = "plain") -> list[int]:
    """Return the ranks that an (m, n) matrix may have, ascending; each has fewer numbers than the matrix.

    A `multiple` that is given is also the smallest rank, where the matrix has so large a one.
    """
    largest = largest_rank(m, n, form)
    if multiple != "auto":
        return list(range(multiple, largest + 1, multiple)) or ([largest] if largest > 0 else [])
    return [rank for rank in range(1, largest + 1) if rank % rank_unit(m, n, rank, multiple) == 0]


def largest_rank(m: int, n: int, form: FactorForm = "plain") -> int:
    """Return the largest rank whose factors have fewer numbers than the (m, n) matrix; 0 if there is none."""
    # The largest k with k (m + n) < m n; and k (m + n - k) < m n is (m - k) (n - k) > 0.
    return (m * n - 1) // (m + n) if form == "plain" else min(m, n) - 1


def pivot_factors(factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the parameters of a LowRankLinear into those of the PivotedLinear with the same product.

    Args:
        factors: "A.weight" (k, n) and "B.weight" (m, k), of linearly independent columns, with k < m.

    Returns:
        "A.weight" (k, n), "B.weight" (m - k, k), both in the dtype of the factors, and "order" (m,).
    """
    a, b = factors["A.weight"], factors["B.weight"]
    # In an orthonormal basis of B's columns the choice of rows does not depend on how σ was shared between A and B.
    basis, inner = torch.linalg.qr(b.double())
    outputs = inner @ a.double()
    moment = outputs @ outputs.T
    # Directions without outputs, of which a matrix of a lower rank has some, count a little: all rows are independent.
    floor = DIRECTION_FLOOR * moment.diagonal().mean() if moment.any() else 1.0
    lengths = torch.linalg.cholesky(moment + floor * torch.eye(len(moment), dtype=moment.dtype, device=moment.device))
    # QR with column pivoting takes the rows that are longest beside those before: students with such pivots train
    # better than with others. torch has no QR with pivoting.
    # lengths lengthsᵀ = outputs outputsᵀ, so these rows have the lengths and angles of the product's, in k columns.
    _, pivots = qr((basis @ lengths).T.cpu().numpy(), mode="r", pivoting=True)
    rows = torch.from_numpy(pivots[: basis.shape[1]].astype("int64")).to(basis.device)
    weights = torch.linalg.solve(basis[rows], basis, left=False)  # (m, k), by which the pivots give all rows
    # QR gives no bound on the weights. So while a row takes more than LARGEST_WEIGHT of a pivot it takes its place,
    # which multiplies the volume of the pivots by this weight, so that the exchange ends.
    while True:
        row, pivot = divmod(int(weights.abs().argmax()), weights.shape[1])
        if not weights[row, pivot].abs() > LARGEST_WEIGHT:
            break
        # Sherman and Morrison's update of basis · basis[rows]⁻¹ for one other row.
        change = weights[row].clone()
        change[pivot] -= 1
        weights -= torch.outer(weights[:, pivot] / weights[row, pivot], change)
        rows[pivot] = row
    others = torch.ones(len(b), dtype=torch.bool, device=b.device)
    others[rows] = False
    order = torch.empty(len(b), dtype=torch.int64, device=b.device)
    order[torch.cat([rows, others.nonzero()[:, 0]])] = torch.arange(len(b), device=b.device)
    return {"A.weight": (basis[rows] @ outputs).to(a), "B.weight": weights[others].to(b), "order": order}
