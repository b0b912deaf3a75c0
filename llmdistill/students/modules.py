"""Low-rank and Kronecker replacements for linears, token embeddings and tied heads.

Letters: n inputs, m outputs, k rank; A (sums, m1, n1) and B (sums, m2, n2) of Kronecker products; T tokens, d width, V
vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from llmdistill.errors import UserError
from llmdistill.internals.transformers_names import mark_initialized
from llmdistill.models.rounding import dequantized
from llmdistill.students.kronecker import KroneckerShape, check_shape, divisors, product_flops, second_factor


class FactorizedLinear(nn.Module):
    """A linear or a head that runs two smaller modules, first A and then B, which has the bias."""

    bias_name = "B.bias"
    """Name of the bias parameter."""
    A: Any
    B: Any

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., n) -> (..., m)."""
        return self.B(self.A(x))

    def dense(self) -> Tensor:
        """Return the product as nn.Linear would hold it, (m, n)."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The dense product; computed at each access, for code that needs a weight."""
        # Under ZeRO-3 parameters are empty placeholders while nothing has gathered them, and so is the product then.
        parameters = list(self.parameters())
        is_whole = all(parameter.numel() for parameter in parameters)
        product = self.dense() if is_whole else parameters[0].new_empty(0)
        # GPT-2's initialization in transformers uses `c_proj.weight` by name; this flag makes it skip the weight.
        mark_initialized(product)
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class LowRankLinear(FactorizedLinear):
    """y = (x A) B + b, which replaces y = x W + b (MaKD eq. 11).

    A (n, k) and B (k, m) are two plain linears, so that adapters can target them and ZeRO-3 gathers each separately; as
    always in torch their `weight` is the transpose.
    """

    def __init__(self, in_features: int, out_features: int, rank: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features)
        self.A = nn.Linear(in_features, rank, bias=False)
        self.B = nn.Linear(rank, out_features, bias=bias)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, for code that needs it beside the weight (Mamba adds it after its scan)."""
        return cast("nn.Parameter | None", self.B.bias)

    def dense(self) -> Tensor:
        return dequantized(self.B.weight) @ dequantized(self.A.weight)


class PivotedLinear(FactorizedLinear):
    """y = [z, z B] in another order + b, with z = x A: k outputs, and combinations of them (PIFA, arXiv 2501.19090).

    A (n, k) and B (k, m - k) are two plain linears, for the reasons of LowRankLinear. The bias (m,) is a parameter of
    this module, and `order` (m,) the place of each output in [z, z B].
    """

    bias_name = "bias"
    order: Tensor

    def __init__(self, in_features: int, out_features: int, rank: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features)
        self.A = nn.Linear(in_features, rank, bias=False)
        self.B = nn.Linear(rank, out_features - rank, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.register_buffer("order", torch.arange(out_features))

    def forward(self, x: Tensor) -> Tensor:
        z = self.A(x)
        y = torch.cat([z, self.B(z)], dim=-1)
        # On a CPU torch selects columns of a matrix many times as fast as entries of the last of three axes.
        y = y.reshape(-1, self.out_features).index_select(1, self.order).view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def dense(self) -> Tensor:
        pivots = dequantized(self.A.weight)
        return torch.cat([pivots, dequantized(self.B.weight) @ pivots])[self.order]


class KroneckerLinear(FactorizedLinear):
    """y = Σ (A_i ⊗ B_i) x + b, which replaces y = W x + b (KroneckerBERT eq. 6), in the cheaper order of eq. 7.

    A (sums, m1, n1), B (sums, m2, n2) and the bias (m,) are parameters of this module itself, so that ZeRO-3 gathers
    them together when the module is called.
    """

    bias_name = "bias"

    def __init__(self, in_features: int, out_features: int, shape: KroneckerShape, *, bias: bool) -> None:
        """Set random weights in the scale of nn.Linear's. Raises UserError if the shape does not divide."""
        super().__init__(in_features, out_features)
        check_shape(shape, out_features, in_features, where="KroneckerLinear")
        self.shape = shape
        with_b_first, with_a_first = product_flops(out_features, in_features, shape)
        self.b_first = with_b_first <= with_a_first
        self.A = nn.Parameter(torch.empty(shape.sums, shape.m1, shape.n1))
        self.B = nn.Parameter(torch.empty(shape.sums, *second_factor(out_features, in_features, shape)))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        std = (3 * in_features * shape.sums) ** -0.25  # std of each factor; the summed product then has variance 1 / 3n
        nn.init.normal_(self.A, std=std)
        nn.init.normal_(self.B, std=std)

    def forward(self, x: Tensor) -> Tensor:
        n1 = self.shape.n1
        blocks = x.reshape(-1, n1, self.in_features // n1)
        y = kronecker_product(blocks, self.A, self.B, b_first=self.b_first).reshape(*x.shape[:-1], self.out_features)
        # In place, as no other code uses the product: the bias then costs only one more pass over it.
        return y if self.bias is None else y.add_(self.bias)

    def dense(self) -> Tensor:
        return torch.einsum("sij,skl->ikjl", self.A, self.B).reshape(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        m2, n2 = self.out_features // self.shape.m1, self.in_features // self.shape.n1
        return f"{super().extra_repr()}, A={self.shape}, B={m2}x{n2}, sums={self.shape.sums}"


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
        z = (x.reshape(tokens * n1, n2) @ b.reshape(sums * m2, n2).T).view(tokens, n1 * sums, m2)  # (T, n1 sums, m2)
        return torch.bmm(_repeat_for_tokens(a.permute(1, 2, 0).reshape(m1, n1 * sums), tokens), z)
    if a_is_small:
        z = torch.bmm(_repeat_for_tokens(a.transpose(0, 1).reshape(m1 * sums, n1), tokens), x)  # (T, m1 sums, n2)
        y = z.view(tokens * m1, sums * n2) @ b.transpose(1, 2).reshape(sums * n2, m2)
        return y.view(tokens, m1, m2)
    if b_first:
        # (T, m2 sums, n1)
        z = torch.bmm(_repeat_for_tokens(b.transpose(0, 1).reshape(m2 * sums, n2), tokens), x.transpose(1, 2))
        y = z.view(tokens * m2, sums * n1) @ a.transpose(1, 2).reshape(sums * n1, m1)
        return y.view(tokens, m2, m1).transpose(1, 2)
    # (T, n2 sums, m1)
    z = (x.transpose(1, 2).reshape(tokens * n2, n1) @ a.reshape(sums * m1, n1).T).view(tokens, n2 * sums, m1)
    return torch.bmm(z.transpose(1, 2), _repeat_for_tokens(b.permute(2, 0, 1).reshape(n2 * sums, m2), tokens))


def _repeat_for_tokens(matrix: Tensor, tokens: int) -> Tensor:
    # A view with stride 0, which bmm reads for each token without a copy.
    return matrix.expand(tokens, *matrix.shape)


class KroneckerHead(FactorizedLinear):
    """The head tied to a KroneckerEmbedding: logits h (A ⊗ B)ᵀ + b without the dense table.

    A folds h (d,) with the embedding's B. B is the linear from d / columns to V with the embedding's A, and it has the
    bias. So the head ends in an nn.Linear, whose product fused losses can compute themselves.
    """

    def __init__(self, in_features: int, out_features: int, columns: int, *, bias: bool) -> None:
        super().__init__(in_features, out_features)
        self.A = Fold(columns)
        self.B = nn.Linear(in_features // columns, out_features, bias=bias)

    def dense(self) -> Tensor:
        return spread(dequantized(self.B.weight), self.A.weight)


class FactorizedEmbedding(nn.Module):
    """Looks up a row of the table A (V, inner width) and maps it by B to the width of the model."""

    B: Any
    scale: float = 1.0
    """What the architecture multiplies each row by (Gemma); it is no part of the table, nor of a tied head."""

    def __init__(self, num_embeddings: int, embedding_dim: int, inner: int, padding_idx: int | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.A = nn.Embedding(num_embeddings, inner, padding_idx=padding_idx)

    def forward(self, input_ids: Tensor) -> Tensor:
        """(B, T) -> (B, T, d)."""
        rows = self.B(self.A(input_ids))
        if self.scale == 1:
            return rows
        # In the dtype of the rows, as Gemma rounds it; full() launches a kernel, where a copy would wait.
        return rows * torch.full((), self.scale, dtype=rows.dtype, device=rows.device)

    @property
    def weight(self) -> Tensor:
        """The whole table; computed at each access, for code that needs it (Llama 4 asks for its device)."""
        return self.dense()

    def dense(self) -> Tensor:
        """Return the whole table, (V, d)."""
        return self.B(dequantized(self.A.weight))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class LowRankEmbedding(FactorizedEmbedding):
    """Row i of A B replaces row i of the table, with A (V, k) and B (k, d).

    A tied head is the LowRankLinear h -> (h Bᵀ) Aᵀ that shares both parameters.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, rank: int, *, padding_idx: int | None = None) -> None:
        super().__init__(num_embeddings, embedding_dim, rank, padding_idx)
        self.B = Widen(rank, embedding_dim)


class KroneckerEmbedding(FactorizedEmbedding):
    """Row A_i ⊗ B replaces row i of the table (KroneckerBERT eq. 8), with A (V, d / columns) and B (columns,)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, columns: int, *, padding_idx: int | None = None
    ) -> None:
        """Raise a UserError if columns does not divide the width."""
        check_columns(columns, embedding_dim, where="KroneckerEmbedding")
        super().__init__(num_embeddings, embedding_dim, embedding_dim // columns, padding_idx)
        self.B = Spread(columns)


class _Weighted(nn.Module):
    """A module whose only parameter is `weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Widen(_Weighted):
    """y = x W without a bias, with W (k, d) stored untransposed, as the first linear of a tied head has it."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) -> (..., d)."""
        return x @ self.weight


class Spread(_Weighted):
    """Maps a row a to the row a ⊗ b, where b (columns,) is the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., d / columns) -> (..., d)."""
        return spread(x, self.weight)


class Fold(_Weighted):
    """The transpose of Spread: maps h to the h' for which h' · a = h · (a ⊗ b) for every a."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., d / columns)."""
        return hidden.unflatten(-1, (-1, len(self.weight))) @ self.weight


def spread(rows: Tensor, b: Tensor) -> Tensor:
    """Return the Kronecker product of each row with b: (..., k) -> (..., k · columns)."""
    # (..., k, 1) * (columns,) -> (..., k, columns)
    return (rows.unsqueeze(-1) * b).flatten(-2)


def check_columns(columns: int, width: int, *, where: str) -> None:
    """Raise a UserError, with the divisors of the width, if columns does not divide the width."""
    if columns < 1 or width % columns:
        raise UserError(
            f"{where}: {columns} columns do not divide the width {width} of the token embedding; take one of "
            f"{', '.join(map(str, divisors(width)))}"
        )
