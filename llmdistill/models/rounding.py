"""Rounds the linears of a model to few bits by torchao, and reads what is rounded.

A weight is torchao's IntxUnpackedToInt8Tensor: a symmetric integer in an int8, with one scale for a group of a row or
for the whole row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.errors import UserError, install_command
from llmdistill.models.general import in_lists

DEFAULT_GROUPS = {"int8": None, "int4": 32}
"""Default group sizes; None is the whole row."""


def bits_of(config: PreTrainedConfig) -> str | None:
    """Return how the weights of a saved model are quantized, such as int4; None if they are not, or not by torchao."""
    return bits_of_saved(getattr(config, "quantization_config", None))


def bits_of_saved(saved: Any) -> str | None:
    values = saved or {} if isinstance(saved, dict | None) else saved.to_dict()
    if values.get("quant_method") == "torchao":
        if isinstance(values["quant_type"], str):  # of transformers before version 5
            return str(values["quant_type"])
        of_torchao = values["quant_type"]["default"]
        return str(of_torchao["_data"].get("weight_dtype", {}).get("_data", of_torchao["_type"]))
    return cast("str | None", (values.get("quantize") or {}).get("weights"))


def check_torchao(key: str) -> None:
    """Raise a UserError that names a setting or flag if torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"{key} needs torchao: {install_command('quantize')}")


def quantized_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the linears that get few bits: each nn.Linear of the layers, factors included.

    Raises UserError if there is none.
    """
    names = [name for name, module in in_lists(model) if type(module) is nn.Linear]
    if not names:
        raise UserError(
            f"{type(model).__name__} has no nn.Linear in its layers, and torchao rounds no other weights: keep it as "
            "it is, or factorize it by svd, whose factors are linears"
        )
    return names


def dequantized(weight: Tensor) -> Tensor:
    """Return the numbers that a weight of few bits stands for, and any other weight as it is."""
    # Only torchao's tensors have this, and torchao need not be installed for the others.
    return weight.dequantize() if hasattr(weight, "tensor_data_names") else weight


@torch.no_grad()
def round_linears(
    model: PreTrainedModel,
    weights: str,
    group_size: int | None = None,
    *,
    transform: Callable[[Any], Any] = lambda config: config,
) -> None:
    """Give the linears of the layers weights of few bits, in place; the config does not tell it.

    `transform` makes torchao's transformation of its config for such weights. Raises UserError if there is no linear.
    """
    from torchao.quantization import quantize_

    # torchao takes one group size in a call.
    names_by_group_size: dict[int | None, set[str]] = {}
    for name in quantized_linears(model):
        size = group_size_of(weights, group_size, cast(nn.Linear, model.get_submodule(name)).in_features)
        names_by_group_size.setdefault(size, set()).add(name)
    for size, chosen in names_by_group_size.items():
        quantize_(
            model,
            transform(torchao_config(weights, size)),
            lambda _, name, chosen=chosen: name in chosen,
        )


def group_size_of(weights: str, group_size: int | None, inputs: int) -> int | None:
    """Return how many weights of a row of `inputs` share a scale; None is the whole row."""
    group_size = group_size or DEFAULT_GROUPS[weights]
    # torchao cuts a row only into equal groups; a linear whose rows do not divide gets one scale a row.
    return group_size if group_size is not None and inputs % group_size == 0 else None


def torchao_config(weights: str, group_size: int | None) -> Any:
    """Return torchao's config of rounded weights; without a group size a row has one scale."""
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup

    granularity = PerAxis(0) if group_size is None else PerGroup(group_size)
    return IntxWeightOnlyConfig(weight_dtype=getattr(torch, weights), granularity=granularity)
