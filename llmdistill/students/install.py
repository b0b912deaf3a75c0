"""Replaces dense modules of a transformers model by factorized ones, in place, and keeps the ties."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightTransform
from transformers.pytorch_utils import Conv1D

from llmdistill.errors import UserError
from llmdistill.internals.transformers_names import (
    mark_initialized,
    set_tied_weights,
    set_weight_conversions,
    tied_weights,
    weight_conversions,
)
from llmdistill.models.families import base_name
from llmdistill.models.general import is_linear
from llmdistill.students.experts import LowRankStack, install_stack, stacks_of
from llmdistill.students.kinds import KINDS, Factorization, Size
from llmdistill.students.modules import FactorizedEmbedding, FactorizedLinear


def features(module: nn.Module) -> tuple[int, int]:
    """Return the outputs m and inputs n of a linear or Conv1D, also of one that ZeRO-3 shards."""
    weight = cast(Tensor, module.weight)
    m, n = getattr(weight, "ds_shape", weight.shape)
    return (n, m) if type(module) is Conv1D else (m, n)


def matrix(module: nn.Module) -> Tensor:
    """Return the weight of a linear or Conv1D as nn.Linear stores it: (m, n), outputs by inputs."""
    weight = cast(Tensor, module.weight)
    return weight.T if type(module) is Conv1D else weight


def weight_of(base: nn.Module, name: str) -> nn.Parameter:
    """Return the weight of a linear, or the stack of experts, that has a name in the base model."""
    parent, _, leaf = name.rpartition(".")
    stack = stacks_of(base.get_submodule(parent)).get(leaf)
    return cast(nn.Parameter, base.get_submodule(name).weight) if stack is None else stack


def matrices(base: nn.Module, name: str) -> Tensor:
    """Return the matrix (m, n) of a linear, outputs by inputs, or those of a stack of experts (E, m, n)."""
    weight = weight_of(base, name)
    return weight if weight.dim() == 3 else matrix(base.get_submodule(name))


def is_factorized(model: PreTrainedModel) -> bool:
    """Return whether any module of the model is factorized."""
    kinds = FactorizedLinear | FactorizedEmbedding | LowRankStack
    return any(isinstance(module, kinds) for module in model.modules())


def install(model: PreTrainedModel, factorization: Factorization) -> None:
    """Replace linears, stacks of experts and the token embedding by factorized modules with random weights, in place.

    Works on the meta device. Raises UserError if the model has no module of a name, if the module is no linear, or if a
    size does not fit.
    """
    kind, base = KINDS[factorization.method], model.base_model
    for name, size in factorization.sizes.items():
        own_name = base_name(model, name)
        parent, _, leaf = own_name.rpartition(".")
        try:
            owner = base.get_submodule(parent)
            stack = None if kind.stack is None else stacks_of(owner).get(leaf)
            dense = owner if stack is not None else base.get_submodule(own_name)
        except AttributeError:
            raise UserError(
                f"{type(model).__name__} has no module {own_name!r}, which the factorization names; "
                "check that the student's config.json belongs to this architecture"
            ) from None
        if stack is not None and kind.stack is not None:
            experts, m, n = stack.shape
            with torch.device(stack.device):
                install_stack(owner, leaf, kind.stack(experts, n, m, size).to(stack.dtype))
            continue
        if not is_linear(dense):
            raise UserError(
                f"module {own_name!r} is a {type(dense).__name__}, only nn.Linear and Conv1D can be factorized"
            )
        base.set_submodule(own_name, _make_like(dense, kind.linear, size))
    if factorization.embedding is not None:
        name, table = token_embedding(model)
        heads = tied_heads(model, name)
        sizes = table.num_embeddings, table.embedding_dim, factorization.embedding
        with torch.device(table.weight.device):
            embedding = kind.embedding(*sizes, padding_idx=table.padding_idx)
        embedding.to(table.weight.dtype)
        embedding.scale = scale_of_rows(table) or 1.0
        model.set_submodule(name, embedding)
        keys = tied_weights(model)
        for head in heads:
            tied = _make_like(model.get_submodule(head), kind.head, factorization.embedding)
            # h (A B)ᵀ = (h Bᵀ) Aᵀ: the head runs the embedding's factors in the other order.
            tied.A.weight, tied.B.weight = embedding.B.weight, embedding.A.weight
            model.set_submodule(head, tied)
            del keys[f"{head}.weight"]
            keys = {target.replace(f"{head}.bias", f"{head}.{tied.bias_name}"): keys[target] for target in keys}
            keys[f"{head}.A.weight"] = f"{name}.B.weight"
            keys[f"{head}.B.weight"] = f"{name}.A.weight"
        # transformers declares ties per class; the ties of this instance are now different.
        set_tied_weights(model, keys)
    save_apart(model)


def save_apart(model: PreTrainedModel) -> None:
    """Let save_pretrained write factors under their own names, in place.

    Of some architectures (GTE, Nomic-BERT) transformers splits a matrix into query, key and value when it loads, and
    joins them when it saves. Their factors have ranks of their own, and some of the three may be dense.
    """
    kinds = FactorizedLinear | FactorizedEmbedding | LowRankStack
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    # Some conversions name a module (q_proj), others the weight that it no longer has (q_proj.weight).
    factors = [f"{name}.{key}" for name, module in modules for key in ("weight", *dict(module.named_parameters()))]
    conversions = _saving_conversions(model)
    apart = [entry for entry in conversions if not (isinstance(entry, WeightConverter) and _renames(entry, factors))]
    if len(apart) < len(conversions):
        set_weight_conversions(model, apart)


def save_joined(model: PreTrainedModel, names: Collection[str]) -> None:
    """Let save_pretrained write matrices with these names as the stock architecture does, in place."""
    own = _saving_conversions(model)
    known = [entry.source_patterns for entry in own]
    stock = [entry for entry in _stock_conversions(model) if isinstance(entry, WeightConverter)]
    joins = [entry for entry in stock if entry.source_patterns not in known and _renames(entry, names)]
    if joins:
        set_weight_conversions(model, [*own, *joins])


def _saving_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions that save_pretrained reverts."""
    own: list[WeightTransform] | None = weight_conversions(model)
    return _stock_conversions(model) if own is None else own


def _stock_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    # Legacy conversions rename weights of old checkpoints (gamma, beta), and saving must not bring those names back.
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [entry for entry in conversions if not isinstance(entry, PrefixChange)]  # as transformers saves a new model


def _renames(conversion: WeightTransform, names: Collection[str]) -> bool:
    saving = conversion.reverse_transform()
    return any(saving.rename_source_key(name)[1] is not None for name in names)


def _make_like(dense: nn.Module, make: Callable[..., FactorizedLinear], size: Size) -> FactorizedLinear:
    """Make a factorized module with random weights, with shape, dtype, device and the same bias as the dense one."""
    m, n = features(dense)
    weight, bias = cast(Tensor, dense.weight), cast("nn.Parameter | None", dense.bias)
    with torch.device(weight.device):
        factorized = make(n, m, size, bias=bias is not None).to(weight.dtype)
    # An architecture initializes linears by their names, which our factors only share.
    for part in factorized.modules():
        mark_initialized(part)
    if bias is not None:
        owner = factorized.B if factorized.bias_name == "B.bias" else factorized
        owner.bias = bias
    return factorized


def token_embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding]:
    """Return the name and module of the model's token embedding, which can be factorized.

    Raises UserError if it does more than look up rows and multiply them by a number, or if another module has the
    table.
    """
    embedding, remedy = model.get_input_embeddings(), "leave embedding_rank and embedding_columns out"
    if scale_of_rows(embedding) is None:
        raise UserError(
            f"the token embedding of {type(model).__name__} is a {type(embedding).__name__}, only an nn.Embedding, "
            f"plain or with a factor, can be factorized; {remedy}"
        )
    name = next(name for name, module in model.named_modules() if module is embedding)
    owner = model.get_expanded_tied_weights_keys().get(f"{name}.weight")
    if owner is not None:
        raise UserError(f"the token embedding of {type(model).__name__} shares its table with {owner}; {remedy}")
    return name, cast(nn.Embedding, embedding)


def can_factorize_embedding(model: PreTrainedModel) -> bool:
    """Return whether `token_embedding` finds one."""
    try:
        token_embedding(model)
    except UserError:
        return False
    return True


def scale_of_rows(embedding: nn.Module) -> float | None:
    """Return what an embedding multiplies the rows of its table by; None if it is none, or does something else."""
    if type(embedding) is nn.Embedding:
        return 1.0
    if not (isinstance(embedding, nn.Embedding) and type(embedding).__name__.endswith("ScaledWordEmbedding")):
        return None
    # Gemma's factor is a buffer, which is on the meta device here, and a plain number under another name.
    name = "scalar_embed_scale" if hasattr(embedding, "scalar_embed_scale") else "embed_scale"
    return float(getattr(embedding, name))


def tied_heads(model: PreTrainedModel, embedding_name: str) -> list[str]:
    """Return the names of the linears whose weight is tied to the token embedding."""
    return [
        target.removesuffix(".weight")
        for target, source in model.get_expanded_tied_weights_keys().items()
        if source == f"{embedding_name}.weight" and target.endswith(".weight")
    ]
