"""The kinds of weighted factors, and what a measurement on several ranks must know about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmdistill.factorize.counting import Shape
from llmdistill.factorize.kronecker import KroneckerShape, second_factor
from llmdistill.factorize.moments import Moments
from llmdistill.factorize.weighted import WeightedSVD, weighted_svd
from llmdistill.factorize.weighted_kronecker import WeightedKronecker, weighted_kronecker


@dataclass(frozen=True, kw_only=True)
class WeightedKind:
    """One kind of weighted factors of a linear."""

    factors: type[Any]
    """The class, whose fields are `tensors`, `figures` and `tokens`."""
    decompose: Callable[[Tensor, Moments, Any], Any]
    """(weight (m, n), moments, size) -> the factors."""
    tensors: Callable[[Shape, Any], Mapping[str, tuple[int, ...]]]
    """((m, n), size) -> the shapes of the tensors in fp32, by field."""
    figures: tuple[str, ...]
    """The fields that are floats."""


def _svd_tensors(shape: Shape, rank: int) -> dict[str, tuple[int, ...]]:
    return {"left": (shape[0], rank), "values": (rank,), "right": (rank, shape[1])}


def _kronecker_tensors(shape: Shape, size: KroneckerShape) -> dict[str, tuple[int, ...]]:
    return {"a": (size.sums, size.m1, size.n1), "b": (size.sums, *second_factor(*shape, size))}


WEIGHTED_KINDS: dict[str, WeightedKind] = {
    "svd": WeightedKind(factors=WeightedSVD, decompose=weighted_svd, tensors=_svd_tensors, figures=("energy", "scale")),
    "kronecker": WeightedKind(
        factors=WeightedKronecker, decompose=weighted_kronecker, tensors=_kronecker_tensors, figures=("cost",)
    ),
}
"""The kinds by the method of the factorization."""
