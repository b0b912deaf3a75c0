"""Counts parameters and FLOPs, and finds the linears that can be factorized; works on the meta device."""

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
    """Number of parameters, where tied ones count once; also on the meta device or partitioned by ZeRO-3."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def forward_flops(model: nn.Module) -> int:
    """FLOPs of a forward pass for one token: 2 for each parameter, and eq. 7 for Kronecker products.

    The parameters of Kronecker products are used many times for a token. The products inside the attention, which grow
    with the length, are left out. An embedding table, which is only looked up, counts as much as a head that is tied to
    it.
    """
    products = [module for module in model.modules() if isinstance(module, KroneckerLinear)]
    of_products = sum(kronecker_flops(each.out_features, each.in_features, each.shape) for each in products)
    factors = sum(kronecker_params(each.out_features, each.in_features, each.shape) for each in products)
    return 2 * (count_parameters(model) - factors) + of_products


def build_reference(config: PreTrainedConfig) -> PreTrainedModel:
    """The model whose parameters papers count, on the meta device, factorized if its config says so.

    This is the base model (with pooler) for encoders, and the causal LM for decoders. Raises UserError if the
    architecture is not supported.
    """
    model = build_meta(config)
    install_saved(model)
    return model


def layer_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linears of the transformer layers by name: every nn.Linear and Conv1D in an nn.ModuleList of the base model.

    Every architecture keeps its layers in a list. The modules that must not be factorized with them (embeddings,
    pooler, lm_head, classifier) are outside of this list or outside of the base model, so no table of architectures is
    needed. Raises UserError if there is no such linear.
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
            f"{type(model).__name__} holds no nn.Linear or Conv1D in a list of layers, so there is nothing to factorize"
        )
    return found


def parse_target(text: str | int, teacher_params: int) -> int:
    """Parse "690000000", "0.69B", "77.25M" or "62%" (of the teacher). Raises UserError for other forms."""
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
    """Each name with the first pattern that matches it and its value. Raises UserError for a pattern without match."""
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
