"""What a factorization loses of a model's matrices, by their kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmdistill.students.kinds import FactorizationKind, Size

Squares = tuple[float, float]
"""Of a matrix W and its product W': ``||W - W'||^2`` and ``||W||^2``."""


@torch.no_grad()
def squares_lost(weight: Tensor, values: Mapping[str, Tensor], kind: FactorizationKind, size: Size) -> Squares:
    """Multiply the stored factors of one matrix (m, n) out, in at least fp32, and compare the product with it."""
    m, n = weight.shape
    with torch.device("meta"):
        factorized = kind.linear(n, m, size, bias=False)
    # assign, as the module has no memory for the values to be copied into
    factorized.load_state_dict(values, assign=True)
    exact = torch.promote_types(weight.dtype, torch.float32)
    difference = factorized.to(exact).dense().sub_(weight)
    norms = (torch.linalg.vector_norm(matrix, dtype=exact) for matrix in (difference, weight))
    left_out, whole = (float(norm) ** 2 for norm in norms)
    return left_out, whole


def by_kind(lost: Mapping[str, Squares]) -> dict[str, dict[str, Any]]:
    """Sum what the matrices lost, as `factorize` measures it, over each kind of matrix.

    Returns:
        For each kind of matrix, by the last part of its name such as q_proj: `matrices`, how many there are, and
        `lost`, ``sqrt(sum ||W - W'||^2 / sum ||W||^2)`` over them, from 0 to about 1. A weighting does not make this
        smallest: it keeps what matters for the data.
    """
    kinds: dict[str, list[Squares]] = defaultdict(list)
    for name, of_matrix in lost.items():
        kinds[name.rsplit(".", 1)[-1]].append(of_matrix)
    return {
        kind: {
            "matrices": len(squares),
            # Matrices of zeros alone lose nothing.
            "lost": math.sqrt(math.fsum(a for a, _ in squares) / max(math.fsum(b for _, b in squares), 1e-30)),
        }
        for kind, squares in kinds.items()
    }
