"""Factorizes a teacher's matrices into products of two smaller ones, and saves, loads and merges the result.

svd (MaKD eq. 10-11): n × m is a matrix as MaKD writes it (y = x W, n inputs, m outputs), k its rank after truncation.
kronecker (KroneckerBERT eq. 1-8): W (m, n) as that paper writes it (y = W x), a sum of A (m1, n1) ⊗ B (m2, n2).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmdistill.factorize.budget import plan, summarise
    from llmdistill.factorize.convert import compress, compress_model, factorize
    from llmdistill.factorize.counting import build_reference, count_parameters
    from llmdistill.factorize.export import export_dense, merge

_MODULES = {
    "build_reference": "counting",
    "compress": "convert",
    "compress_model": "convert",
    "count_parameters": "counting",
    "export_dense": "export",
    "factorize": "convert",
    "merge": "export",
    "plan": "budget",
    "summarise": "budget",
}
"""Name -> its module. These modules need transformers' models, but hub.py must load while transformers itself is
being imported."""

__all__ = [
    "build_reference",
    "compress",
    "compress_model",
    "count_parameters",
    "export_dense",
    "factorize",
    "merge",
    "plan",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
