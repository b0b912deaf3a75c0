"""Kronecker replacements for a linear, a token embedding and a head tied to it; their forward passes never build A ⊗ B.

Letters as in `kronecker`: m outputs, n inputs, A (sums, m1, n1), B (sums, m2, n2); T tokens, V vocabulary, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmdistill.errors import UserError
from llmdistill.factorize.kronecker import KroneckerShape, check_shape, divisors, product_flops, second_factor


class KroneckerLinear(nn.Module):
    """y = Σ (A_i ⊗ B_i) x + b, which replaces y = W x + b (KroneckerBERT eq. 6), in the cheaper order of eq. 7.

    A (sums, m1, n1), B (sums, m2, n2) and the bias (m,) are parameters of this module itself, so that ZeRO-3 gathers
    them together when the module is called.
    """

    bias_name = "bias"
    """Name of the bias parameter."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        shape: KroneckerShape,
        *,
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Set random weights in the scale of nn.Linear's. Raises UserError if the shape does not divide."""
        super().__init__()
        check_shape(shape, out_features, in_features, where="KroneckerLinear")
        self.in_features, self.out_features, self.shape = in_features, out_features, shape
        m2, n2 = second_factor(out_features, in_features, shape)
        with_b_first, with_a_first = product_flops(out_features, in_features, shape)
        self.b_first = with_b_first <= with_a_first
        self.A = nn.Parameter(torch.empty(shape.sums, shape.m1, shape.n1, device=device, dtype=dtype))
        self.B = nn.Parameter(torch.empty(shape.sums, m2, n2, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        std = (3 * in_features * shape.sums) ** -0.25  # std of each factor; the summed product then has variance 1 / 3n
        nn.init.normal_(self.A, std=std)
        nn.init.normal_(self.B, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., m)."""
        n1 = self.shape.n1
        blocks = x.reshape(-1, n1, self.in_features // n1)
        y = kronecker_product(blocks, self.A, self.B, b_first=self.b_first).reshape(*x.shape[:-1], self.out_features)
        # The bias is added in place: no other code uses the product, and the bias then costs only one more pass over
        # it.
        return y if self.bias is None else y.add_(self.bias)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of the products, (m, n), computed in `dtype`."""
        a, b = (factor if dtype is None else factor.to(dtype) for factor in (self.A, self.B))
        return torch.einsum("sij,skl->ikjl", a, b).reshape(self.out_features, self.in_features)

    @property
    def weight(self) -> Tensor:
        """The dense product as nn.Linear would hold it, (m, n); computed at each access, for code that needs it."""
        product = self.dense()
        # GPT-2's initialisation in transformers uses `c_proj.weight` by name; this flag makes it skip the weight.
        product._is_hf_initialized = True  # type: ignore[attr-defined]
        return product

    def extra_repr(self) -> str:
        m2, n2 = self.B.shape[1:]
        sums = "" if self.shape.sums == 1 else f", sums={self.shape.sums}"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"A={self.shape}, B={m2}x{n2}{sums}, bias={self.bias is not None}"
        )


def kronecker_product(x: Tensor, a: Tensor, b: Tensor, *, b_first: bool) -> Tensor:
    """y (T, m1, m2) with y_t = Σ A_i x_t B_iᵀ, which is (A_i ⊗ B_i) x_t row by row (eq. 6), for x (T, n1, n2).

    The larger factor is multiplied with all tokens as one matrix, the smaller factor with one token at a time. A
    batched product can read and write a block transposed, so the order of the axes costs no copy if A is the smaller
    factor, and one copy if B is. The products are added inside of the second multiplication.
    """
    tokens = x.shape[0]
    (sums, m1, n1), (_, m2, n2) = a.shape, b.shape
    a_is_small = m1 * n1 <= m2 * n2
    if a_is_small and b_first:
        z = (x.reshape(tokens * n1, n2) @ b.reshape(sums * m2, n2).T).view(tokens, n1 * sums, m2)
        return torch.bmm(_for_each(a.permute(1, 2, 0).reshape(m1, n1 * sums), tokens), z)
    if a_is_small:
        z = torch.bmm(_for_each(a.transpose(0, 1).reshape(m1 * sums, n1), tokens), x)
        y = z.view(tokens * m1, sums * n2) @ b.transpose(1, 2).reshape(sums * n2, m2)
        return y.view(tokens, m1, m2)
    if b_first:
        z = torch.bmm(_for_each(b.transpose(0, 1).reshape(m2 * sums, n2), tokens), x.transpose(1, 2))
        y = z.view(tokens * m2, sums * n1) @ a.transpose(1, 2).reshape(sums * n1, m1)
        return y.view(tokens, m2, m1).transpose(1, 2)
    z = (x.transpose(1, 2).reshape(tokens * n2, n1) @ a.reshape(sums * m1, n1).T).view(tokens, n2 * sums, m1)
    return torch.bmm(z.transpose(1, 2), _for_each(b.permute(2, 0, 1).reshape(n2 * sums, m2), tokens))


def _for_each(matrix: Tensor, tokens: int) -> Tensor:
    return matrix.expand(tokens, *matrix.shape)


class Spread(nn.Module):
    """Maps a row a to the row a ⊗ b, where b (columns,) is a parameter."""

    def __init__(self, columns: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., k · columns)."""
        return (x.unsqueeze(-1) * self.weight).flatten(-2)


class Fold(nn.Module):
    """The transpose of Spread: maps h to the h' for which h' · a = h · (a ⊗ b) for every a."""

    def __init__(self, columns: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., k · columns) -> (..., k)."""
        return hidden.unflatten(-1, (-1, len(self.weight))) @ self.weight


class KroneckerEmbedding(nn.Module):
    """Row A_i ⊗ B replaces row i of the table (KroneckerBERT eq. 8), with A (V, d / columns) and B (columns,)."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        columns: int,
        *,
        padding_idx: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises UserError if columns does not divide the width."""
        super().__init__()
        check_columns(columns, embedding_dim, where="KroneckerEmbedding")
        self.num_embeddings, self.embedding_dim, self.columns = num_embeddings, embedding_dim, columns
        self.padding_idx = padding_idx
        width = embedding_dim // columns
        self.A = nn.Embedding(num_embeddings, width, padding_idx=padding_idx, device=device, dtype=dtype)
        self.B = Spread(columns, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, d)."""
        return self.B(self.A(input_ids))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The table, (V, d), computed in `dtype`."""
        return _spread(self.A.weight, self.B.weight, dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, columns={self.columns}"


class KroneckerHead(nn.Module):
    """The head tied to a KroneckerEmbedding: logits h (A ⊗ B)ᵀ + b without the dense table.

    A folds h (d,) with the embedding's B. B is the linear from d / columns to V with the embedding's A, and it has the
    bias. So the head ends in an nn.Linear, whose product fused losses can compute themselves.
    """

    bias_name = "B.bias"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        columns: int,
        *,
        bias: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises UserError if columns does not divide the width."""
        super().__init__()
        check_columns(columns, in_features, where="KroneckerHead")
        self.in_features, self.out_features, self.columns = in_features, out_features, columns
        self.A = Fold(columns, device=device, dtype=dtype)
        self.B = nn.Linear(in_features // columns, out_features, bias=bias, device=device, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., V)."""
        return self.B(self.A(hidden))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The head's matrix, (V, d), computed in `dtype`."""
        return _spread(self.B.weight, self.A.weight, dtype)

    @property
    def weight(self) -> Tensor:
        """The dense matrix as nn.Linear would hold it; computed at each access, for code that needs a weight."""
        product = self.dense()
        product._is_hf_initialized = True  # type: ignore[attr-defined]  # as KroneckerLinear's
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, columns={self.columns}"


def check_columns(columns: int, width: int, *, where: str) -> None:
    """Raises UserError, with the divisors of the width, if columns does not divide the width."""
    if columns < 1 or width % columns:
        raise UserError(
            f"{where}: {columns} columns do not divide the width {width} of the token embedding; take one of "
            f"{', '.join(map(str, divisors(width)))}"
        )


def _spread(table: Tensor, row: Tensor, dtype: torch.dtype | None) -> Tensor:
    table, row = (each if dtype is None else each.to(dtype) for each in (table, row))
    return (table[:, :, None] * row).flatten(1)
