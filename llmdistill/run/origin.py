"""Finds where in two models the first value that is not finite comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_iter


def first_not_finite(models: Mapping[str, nn.Module], run: Callable[[], None]) -> str:
    """Run forward passes and say, as part of a sentence, where the first value that is not finite was computed.

    The models are named as they are called, in the order in which they run: teacher, student.
    """
    wrong = [
        f"the {called}'s parameter {name} is not finite"
        for called, model in models.items()
        for name, each in model.named_parameters()
        if not getattr(each, "ds_tensor", each).isfinite().all()  # under ZeRO-3 a rank looks at its own shard
    ]
    places = {each: (called, name) for called, model in models.items() for name, each in model.named_modules()}
    found: list[tuple[str, str]] = []

    def look(module: nn.Module, _args: Any, output: Any) -> None:
        tensors = (each for each in tree_iter(output) if isinstance(each, Tensor) and each.is_floating_point())
        if not found and module in places and not all(each.isfinite().all() for each in tensors):
            found.append(places[module])

    handle = register_module_forward_hook(look)
    try:
        run()  # in any case: the other ranks may find nothing wrong with their shards
    finally:
        handle.remove()
    if wrong:
        return wrong[0]
    names = " and ".join(models)
    if not found:
        return f"the outputs of {names} are finite"
    called, module = found[0]
    return f"the first of {names} with an output that is not finite is the {called}, in {module or 'its output'}"
