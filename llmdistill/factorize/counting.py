"""Parameters and FLOPs of models, and the linears that can be factorised; from shapes, so the meta device will do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from llmdistill.errors import UserError
from llmdistill.factorize.hub import install_saved
from llmdistill.factorize.install import LINEAR_TYPES
from llmdistill.factorize.kronecker import kronecker_flops, kronecker_params
from llmdistill.factorize.kronecker_modules import KroneckerLinear
from llmdistill.models.load import build_meta

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Shape = tuple[int, int]
"""Outputs m and inputs n of a matrix."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}

_Value = TypeVar("_Value")


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, each tied one once; also of one on the meta device or partitioned by ZeRO-3."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def forward_flops(model: nn.Module) -> int:
    """FLOPs of a forward pass for one token: 2 a parameter, of Kronecker products what eq. 7 says.

    Their parameters are used many times for a token. Attention's own products, which grow with the length, are left
    out, and a table that is only looked up counts as a head that is tied to it would.
    """
    products = [module for module in model.modules() if isinstance(module, KroneckerLinear)]
    of_products = sum(kronecker_flops(each.out_features, each.in_features, each.shape) for each in products)
    factors = sum(kronecker_params(each.out_features, each.in_features, each.shape) for each in products)
    return 2 * (count_parameters(model) - factors) + of_products


def build_reference(config: PreTrainedConfig) -> PreTrainedModel:
    """The model whose parameters papers count, on the meta device, factorised where its config says so.

    Base model (with pooler) for encoders, causal LM for decoders. UserError if the architecture is not supported.
    """
    model = build_meta(config)
    install_saved(model)
    return model


def layer_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linears of the transformer layers by name: every nn.Linear and Conv1D in an nn.ModuleList of the base model.

    Layers are kept in a list in every architecture, and what may not be factorised with them (embeddings, pooler,
    language-model head, classifier) stands outside of it or outside of the base model; so no table is needed.
    UserError if there is none.
    """
    base = model.base_model
    lists = [f"{name}." for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    prefix = "" if base is model else f"{model.base_model_prefix}."
    found = {
        prefix + name: module
        for name, module in base.named_modules()
        if type(module) in LINEAR_TYPES and name.startswith(tuple(lists))
    }
    if not found:
        raise UserError(
            f"{type(model).__name__} holds no nn.Linear or Conv1D in a list of layers, so there is nothing to factorise"
        )
    return found


def parse_target(text: str | int, teacher_params: int) -> int:
    """Parameters meant by "690000000", "0.69B", "77.25M" or "62%" (of the teacher). UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([KMB%]?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise UserError(f"target_params {text!r} is no number of parameters; write 690000000, 0.69B, 77.25M or 62%")
    number, suffix = Decimal(match[1].replace("_", "")), match[2].upper()
    target = int(number * teacher_params / 100) if suffix == "%" else int(number * _SUFFIXES[suffix])
    if target >= teacher_params:
        raise UserError(
            f"target_params {text} is not below the model's own {teacher_params:,}; nothing would be compressed"
        )
    return target


def by_pattern(
    patterns: Mapping[str, _Value], names: Collection[str], *, key: str
) -> Iterator[tuple[str, str, _Value]]:
    """Each name that a pattern covers, with the first such pattern and its value. UserError if one covers none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or list(names)[:3]
            raise UserError(
                f"pattern {pattern!r} in {key} matches no linear of the transformer layers; the nearest are "
                f"{', '.join(near)} (a pattern covers the whole name: *.q_proj)"
            )
    for name in names:
        first = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if first is not None:
            yield name, first, patterns[first]
