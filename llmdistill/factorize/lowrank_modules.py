"""Low-rank replacements for a linear and for a token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LowRankLinear(nn.Module):
    """y = (x A) B + b, which replaces y = x W + b (MaKD eq. 11).

    A (n, k) and B (k, m) are two plain linears, so that adapters can target them and ZeRO-3 gathers each separately; as
    always in torch their `weight` is the transpose. The bias belongs to B.
    """

    bias_name = "B.bias"
    """Name of the bias parameter."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.A = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.B = nn.Linear(rank, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., m)."""
        return self.B(self.A(x))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The product as nn.Linear would hold it, (m, n), computed in `dtype`."""
        return _product(self.B.weight, self.A.weight, dtype)

    @property
    def weight(self) -> Tensor:
        """The product as nn.Linear would hold it, (m, n); computed at each access, for code that needs a weight."""
        product = self.dense()
        # GPT-2's initialisation in transformers uses `c_proj.weight` by name; this flag makes it skip the weight.
        product._is_hf_initialized = True  # type: ignore[attr-defined]
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


class Widen(nn.Module):
    """y = x W without a bias, with W (k, m) stored untransposed, as the first linear of a tied head has it."""

    def __init__(
        self, rank: int, width: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rank, width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., m)."""
        return x @ self.weight


class LowRankEmbedding(nn.Module):
    """Row i of A B replaces row i of E: A (V, k) is a table, B has shape (k, W).

    A tied head is the LowRankLinear h -> (h Bᵀ) Aᵀ that shares both parameters.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        *,
        padding_idx: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.rank = num_embeddings, embedding_dim, rank
        self.padding_idx = padding_idx
        self.A = nn.Embedding(num_embeddings, rank, padding_idx=padding_idx, device=device, dtype=dtype)
        self.B = Widen(rank, embedding_dim, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, W)."""
        return self.B(self.A(input_ids))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The table, (V, W), computed in `dtype`."""
        return _product(self.A.weight, self.B.weight, dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}"


def _product(left: Tensor, right: Tensor, dtype: torch.dtype | None) -> Tensor:
    return left @ right if dtype is None else left.to(dtype) @ right.to(dtype)
