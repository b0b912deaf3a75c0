"""Low-rank stand-ins for a linear and for a token embedding, and their exchange inside a transformers model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llmdistill.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LINEAR_TYPES = (nn.Linear, Conv1D)
"""What can be factorised. Exact types: a subclass (quantised, or read by its owner's fused kernel) is left alone."""


class LowRankLinear(nn.Module):
    """y = (x A) B + b, in place of y = x W + b (MaKD eq. 11).

    A (n, k) and B (k, m) live in two plain linears, so that adapters can target them and ZeRO-3 gathers each
    by itself; as always in torch their `weight` is the transpose. The bias is B's.
    """

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
        """(..., n) to (..., m)."""
        return self.B(self.A(x))

    @property
    def weight(self) -> Tensor:
        """The product as nn.Linear would hold it, (m, n); computed anew each time, for code that asks for it."""
        product = self.B.weight @ self.A.weight
        # GPT-2's initialisation in transformers reaches for `c_proj.weight` by name; the flag makes it pass on.
        product._is_hf_initialized = True  # type: ignore[attr-defined]
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


class Widen(nn.Module):
    """y = x W without a bias, W (k, m) stored as it stands: the shape that a tied head's first linear has too."""

    def __init__(
        self, rank: int, width: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rank, width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., k) to (..., m)."""
        return x @ self.weight


class LowRankEmbedding(nn.Module):
    """Row i of A B, in place of row i of E: A (V, k) a table, B (k, W).

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
        """(B, T) to (B, T, W)."""
        return self.B(self.A(input_ids))

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}"


def features(module: nn.Module) -> tuple[int, int]:
    """Inputs n and outputs m of a linear or Conv1D."""
    n, m = matrix(module).shape
    return n, m


def matrix(module: nn.Module) -> Tensor:
    """The weight of a linear or Conv1D as MaKD writes it: (n, m), y = x W."""
    weight = cast(Tensor, module.weight)
    return weight if type(module) is Conv1D else weight.T


def base_name(model: PreTrainedModel, name: str) -> str:
    """A module's name inside the base model, the form kept in config.json: every head's model can read it."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def is_factorised(model: PreTrainedModel) -> bool:
    """Whether any module of the model is low-rank."""
    return any(isinstance(module, LowRankLinear | LowRankEmbedding) for module in model.modules())


def install(model: PreTrainedModel, ranks: Mapping[str, int], embedding_rank: int | None) -> None:
    """Exchange the named linears, and the token embedding, for low-rank modules with fresh weights, in place.

    Names are those of the model or of its base model. Works on the meta device. UserError for a name that the model
    does not have or that is no linear.
    """
    base = model.base_model
    for name, rank in ranks.items():
        own_name = base_name(model, name)
        try:
            dense = base.get_submodule(own_name)
        except AttributeError:
            raise UserError(
                f"{type(model).__name__} has no module {own_name!r}, which the factorisation names; "
                "check that the student's config.json belongs to this architecture"
            ) from None
        if type(dense) not in LINEAR_TYPES:
            raise UserError(
                f"module {own_name!r} is a {type(dense).__name__}, only nn.Linear and Conv1D can be low-rank"
            )
        replace(base, own_name, low_rank_linear(dense, rank))
    if embedding_rank is not None:
        _install_embedding(model, embedding_rank)


def low_rank_linear(dense: nn.Module, rank: int) -> LowRankLinear:
    """A low-rank module of fresh weights with the shape, dtype and device of a linear or Conv1D, and its very bias."""
    n, m = features(dense)
    weight, bias = cast(Tensor, dense.weight), cast("nn.Parameter | None", dense.bias)
    low_rank = LowRankLinear(n, m, rank, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    if bias is not None:
        low_rank.B.bias = bias
    return low_rank


def replace(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of that dotted name."""
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def token_embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding]:
    """Name and module of the model's token embedding. UserError where it is no plain nn.Embedding."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding:
        raise UserError(
            f"the token embedding of {type(model).__name__} is a {type(embedding).__name__}, only a plain nn.Embedding "
            "can be factorised; leave embedding_rank out"
        )
    return next(name for name, module in model.named_modules() if module is embedding), embedding


def tied_heads(model: PreTrainedModel, embedding_name: str) -> list[str]:
    """Names of the linears whose weight is the token embedding's."""
    return [
        target.removesuffix(".weight")
        for target, source in model.get_expanded_tied_weights_keys().items()
        if source == f"{embedding_name}.weight" and target.endswith(".weight")
    ]


def _install_embedding(model: PreTrainedModel, rank: int) -> None:
    name, dense = token_embedding(model)
    heads = tied_heads(model, name)
    weight = dense.weight
    low_rank = LowRankEmbedding(
        dense.num_embeddings,
        dense.embedding_dim,
        rank,
        padding_idx=dense.padding_idx,
        device=weight.device,
        dtype=weight.dtype,
    )
    replace(model, name, low_rank)
    keys = dict(model._tied_weights_keys or {})
    for head in heads:
        low_rank_head = low_rank_linear(model.get_submodule(head), rank)
        low_rank_head.A.weight, low_rank_head.B.weight = low_rank.B.weight, low_rank.A.weight
        replace(model, head, low_rank_head)
        del keys[f"{head}.weight"]
        keys = {target.replace(f"{head}.bias", f"{head}.B.bias"): source for target, source in keys.items()}
        keys[f"{head}.A.weight"] = f"{name}.B.weight"
        keys[f"{head}.B.weight"] = f"{name}.A.weight"
    # transformers declares ties per class; those of this instance now differ.
    model._tied_weights_keys = keys
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
