"""The kinds of factorization, and all their differences in changing, saving, loading and merging models.

The code that installs, loads, fills and merges modules reads the table at the end and has no special cases for a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from llmdistill.config.student import FactorForm
from llmdistill.models.student_form import is_size
from llmdistill.students.experts import LowRankStack
from llmdistill.students.kronecker import KroneckerShape, nearest_kronecker
from llmdistill.students.modules import (
    FactorizedEmbedding,
    FactorizedLinear,
    KroneckerEmbedding,
    KroneckerHead,
    KroneckerLinear,
    LowRankEmbedding,
    LowRankLinear,
    PivotedLinear,
)
from llmdistill.students.svd import pivot_factors, place_sigma, truncated_svd

Size: TypeAlias = int | KroneckerShape
"""The size of a factorized matrix: a rank, or the shape of its first Kronecker factors."""
Sigma = Literal["left", "balanced"]


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """Which matrices of a model are replaced by products, and of which sizes."""

    method: str = "svd"
    """The name of its kind."""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    """Rank or shape by the name of the linear, in the model or in its base model; all other linears stay dense."""
    embedding: int | None = None
    """Rank or columns of the token embedding; None keeps it dense."""


@dataclass(frozen=True, kw_only=True)
class FactorizationKind:
    """One kind of factorization."""

    embedding_key: str
    """The key of the factorized embedding's size, in settings and in config.json."""
    dense_embedding: int | None
    """The size of the embedding that means a dense table, if there is one."""
    read_size: Callable[[Any], Size]
    """Reads the size of a matrix from its value in config.json; raises ValueError or TypeError for any other value."""
    linear: Callable[..., FactorizedLinear]
    """(inputs, outputs, size, *, bias) -> a linear with random weights."""
    embedding: Callable[..., FactorizedEmbedding]
    """(vocabulary, width, size, *, padding_idx) -> a token embedding with random weights."""
    head: Callable[..., FactorizedLinear]
    """(width, vocabulary, size, *, bias) -> a head that can be tied to the embedding: the head's A.weight is the
    embedding's B.weight, the head's B.weight the embedding's A.weight."""
    factors: Callable[[Tensor, Any, Sigma], dict[str, Tensor]]
    """(weight (outputs, inputs), size, position of σ) -> the best factors of a linear, by name."""
    parameters: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    """The factors of a linear, by `factors` or weighted -> the values of its parameters and buffers, by name."""
    embedding_factors: Callable[[Tensor, int, Sigma], dict[str, Tensor]]
    """(table (vocabulary, width), size, position of σ) -> the best values of the embedding's parameters, by name."""
    stack: Callable[..., LowRankStack] | None = None
    """(experts, inputs, outputs, size) -> factors of a stack with random weights; None leaves stacks dense."""


def _rank(value: Any) -> int:
    if not is_size(value):
        raise ValueError(f"{value!r} is no rank")
    return value


def low_rank_values(u: Tensor, s: Tensor, vh: Tensor, sigma: Sigma) -> dict[str, Tensor]:
    """Return the parameters of a LowRankLinear from U (n, k), Σ, Vᵀ (k, m); MaKD writes a matrix (inputs, outputs)."""
    a, b = place_sigma(u, s, vh, sigma)
    return {"A.weight": a.T, "B.weight": b.T}


def _shape(value: Any) -> KroneckerShape:
    shape = KroneckerShape(*value)
    if not all(is_size(number) for number in shape):
        raise ValueError(f"{value!r} is no shape")
    return shape


def _kronecker_embedding_factors(table: Tensor, columns: int, _sigma: Sigma) -> dict[str, Tensor]:
    vocabulary, width = table.shape
    a, b = nearest_kronecker(table, KroneckerShape(vocabulary, width // columns))
    # A has all rows of the table, so B (1, 1, columns) is a single row.
    return {"A.weight": a[0], "B.weight": b[0, 0]}


_SVD = FactorizationKind(
    embedding_key="embedding_rank",
    dense_embedding=None,
    read_size=_rank,
    linear=LowRankLinear,
    embedding=LowRankEmbedding,
    head=LowRankLinear,
    factors=lambda weight, rank, sigma: low_rank_values(*truncated_svd(weight.T, rank), sigma),
    parameters=dict,
    embedding_factors=lambda table, rank, sigma: dict(
        zip(("A.weight", "B.weight"), place_sigma(*truncated_svd(table, rank), sigma), strict=True)
    ),
    stack=LowRankStack,
)
KINDS: dict[str, FactorizationKind] = {
    "svd": _SVD,
    "pivoted": replace(_SVD, linear=PivotedLinear, parameters=pivot_factors, stack=None),
    "kronecker": FactorizationKind(
        embedding_key="embedding_columns",
        dense_embedding=1,
        read_size=_shape,
        linear=KroneckerLinear,
        embedding=KroneckerEmbedding,
        head=KroneckerHead,
        # Both factors have √σ, whatever sigma says.
        factors=lambda weight, shape, _: dict(zip("AB", nearest_kronecker(weight, shape), strict=True)),
        parameters=dict,
        embedding_factors=_kronecker_embedding_factors,
    ),
}
"""The kinds by the `method` of a student's config.json: that of its settings, or pivoted for svd in this form."""


def kind_name(method: str, form: FactorForm) -> str:
    """Return the name of the kind for a method and a form of its factors."""
    return method if form == "plain" else form
