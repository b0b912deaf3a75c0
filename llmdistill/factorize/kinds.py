"""The kinds of factorisation, and all in which they differ where models are changed, saved, loaded and merged.

A kind is a row of the table at the end; what installs, loads, fills and merges modules reads it and knows no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from llmdistill.errors import UserError
from llmdistill.factorize.kronecker import KroneckerShape, nearest_kronecker
from llmdistill.factorize.kronecker_modules import KroneckerEmbedding, KroneckerHead, KroneckerLinear
from llmdistill.factorize.lowrank_modules import LowRankEmbedding, LowRankLinear
from llmdistill.factorize.svd import place_sigma, truncated_svd

Size: TypeAlias = int | KroneckerShape
"""What a matrix is factorised to: a rank, or the shape of its first Kronecker factors."""
Sigma = Literal["left", "balanced"]
FactorisedLinear: TypeAlias = LowRankLinear | KroneckerLinear
FactorisedHead: TypeAlias = LowRankLinear | KroneckerHead
FactorisedEmbedding: TypeAlias = LowRankEmbedding | KroneckerEmbedding
FACTORISED_LINEARS = (LowRankLinear, KroneckerLinear, KroneckerHead)
FACTORISED_EMBEDDINGS = (LowRankEmbedding, KroneckerEmbedding)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of factorisation. Every module of it has `dense(dtype)`, every linear `bias_name`."""

    embedding_key: str
    """What the size of the factorised embedding is called, in settings and in config.json."""
    dense_embedding: int | None
    """The size of the embedding that stands for the table as it is, if there is one."""
    read_size: Callable[[Any], Any]
    """A matrix' size from what config.json holds of it; ValueError or TypeError for anything else."""
    write_size: Callable[[Any], Any]
    """The same as a plain JSON value."""
    linear: Callable[..., FactorisedLinear]
    """(inputs, outputs, size, *, bias, device, dtype) to a module of fresh weights."""
    embedding: Callable[..., FactorisedEmbedding]
    """(vocabulary, width, size, *, padding_idx, device, dtype) to the same for a token embedding."""
    head: Callable[..., FactorisedHead]
    """(width, vocabulary, size, *, bias, device, dtype) to a head that can be tied to it: its A.weight is the
    embedding's B.weight, its B.weight the embedding's A.weight."""
    factors: Callable[[Tensor, Any, Sigma], dict[str, Tensor]]
    """A weight (outputs, inputs), its size and where σ goes, to the best values of the linear's parameters by name."""
    embedding_factors: Callable[[Tensor, int, Sigma], dict[str, Tensor]]
    """The same for a table (vocabulary, width) and the embedding."""


def _rank(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{value!r} is no rank")
    return value


def _svd_factors(weight: Tensor, rank: int, sigma: Sigma) -> dict[str, Tensor]:
    a, b = place_sigma(*truncated_svd(weight.T, rank), sigma)  # MaKD writes the matrix (inputs, outputs)
    return {"A.weight": a.T, "B.weight": b.T}


def _svd_embedding_factors(table: Tensor, rank: int, sigma: Sigma) -> dict[str, Tensor]:
    a, b = place_sigma(*truncated_svd(table, rank), sigma)
    return {"A.weight": a, "B.weight": b}


def _shape(value: Any) -> KroneckerShape:
    shape = KroneckerShape(*value)
    if not all(isinstance(number, int) and number >= 1 for number in shape):
        raise ValueError(f"{value!r} is no shape")
    return shape


def _kronecker_factors(weight: Tensor, shape: KroneckerShape, _sigma: Sigma) -> dict[str, Tensor]:
    a, b = nearest_kronecker(weight, shape)
    return {"A": a, "B": b}


def _kronecker_embedding_factors(table: Tensor, columns: int, _sigma: Sigma) -> dict[str, Tensor]:
    vocabulary, width = table.shape
    a, b = nearest_kronecker(table, KroneckerShape(vocabulary, width // columns))
    return {"A.weight": a[0], "B.weight": b[0, 0]}


KINDS: dict[str, Kind] = {
    "svd": Kind(
        embedding_key="embedding_rank",
        dense_embedding=None,
        read_size=_rank,
        write_size=int,
        linear=LowRankLinear,
        embedding=LowRankEmbedding,
        head=LowRankLinear,
        factors=_svd_factors,
        embedding_factors=_svd_embedding_factors,
    ),
    "kronecker": Kind(
        embedding_key="embedding_columns",
        dense_embedding=1,
        read_size=_shape,
        write_size=list,
        linear=KroneckerLinear,
        embedding=KroneckerEmbedding,
        head=KroneckerHead,
        factors=_kronecker_factors,
        embedding_factors=_kronecker_embedding_factors,
    ),
}
"""By the `method` of settings and of a student's config.json."""


def kind_of(method: str) -> Kind:
    """UserError for a method that there is not."""
    if method not in KINDS:
        raise UserError(f"there is no method {method!r} of factorisation; there are {', '.join(KINDS)}")
    return KINDS[method]
