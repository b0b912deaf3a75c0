"""Finds where the first value that is not finite is: among the parameters of a model, or in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from llmdistill.internals.torch_names import tree_iter
from llmdistill.models.rounding import dequantized

_WHOLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of weights that are not of few bits, and of torchao's, which name the dtype that they were rounded from."""


def first_not_finite_parameter(model: nn.Module) -> str | None:
    """Return the name of the first parameter with a value that is not finite, under ZeRO-3 in this rank's shard."""
    shards = ((name, getattr(weight, "ds_tensor", weight)) for name, weight in model.named_parameters())
    plain = ((name, shard) for name, shard in shards if shard.dtype in _WHOLE and not shard.is_meta)
    return next((name for name, shard in plain if not dequantized(shard).isfinite().all()), None)


def first_not_finite(models: Mapping[str, nn.Module], run: Callable[[], None]) -> str:
    """Run forward passes and say, as part of a sentence, where the first value that is not finite was computed.

    The models are named as they are called, in the order in which they run: teacher, student.
    """
    parameters = ((called, first_not_finite_parameter(model)) for called, model in models.items())
    broken = [f"the {called}'s parameter {name} is not finite" for called, name in parameters if name is not None]
    places = {module: (called, name) for called, model in models.items() for name, module in model.named_modules()}
    first: list[tuple[str, str]] = []

    def record_first(module: nn.Module, _args: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        if not first and module in places and not all(tensor.isfinite().all() for tensor in tensors):
            first.append(places[module])

    handle = register_module_forward_hook(record_first)
    try:
        run()  # in any case: the other ranks may find nothing wrong with their shards
    finally:
        handle.remove()
    if broken:
        return broken[0]
    names = " and ".join(models)
    if not first:
        return f"the outputs of {names} are finite"
    called, module = first[0]
    return f"the first of {names} with an output that is not finite is the {called}, in {module or 'its output'}"
