"""A teacher's matrices as products of two smaller ones: planning, doing, saving, loading and undoing it.

Letters: n × m is a matrix as MaKD writes it (y = x W, n inputs, m outputs), k its rank after truncation.
"""

from __future__ import annotations

from llmdistill.factorize.budget import build_reference, count_parameters, plan, summarise
from llmdistill.factorize.convert import compress, factorize
from llmdistill.factorize.export import export_dense, merge

__all__ = ["build_reference", "compress", "count_parameters", "export_dense", "factorize", "merge", "plan", "summarise"]
