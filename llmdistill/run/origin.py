"""Finds where in two models the first value that is not finite comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


def first_not_finite(models: Mapping[str, nn.Module], run: Callable[[], None]) -> str:
    """Run forward passes and say, as part of a sentence, where the first value that is not finite was computed.

    Args:
        models: the models by what they are called, in the order in which they run: teacher, student.
        run: runs them.
    """
    for called, model in models.items():
        # Under ZeRO-3 a rank looks at its own shard of a parameter.
        named = ((name, getattr(each, "ds_tensor", each)) for name, each in model.named_parameters())
        wrong = next((name for name, each in named if not each.isfinite().all()), None)
        if wrong is not None:
            return f"the {called}'s parameter {wrong} is not finite"
    with _watching(models) as found:
        run()
    names = " and ".join(models)
    if not found:
        return f"the outputs of {names} are finite"
    called, module = found[0]
    return f"the first of {names} with an output that is not finite is the {called}, in {module or 'its output'}"


@contextmanager
def _watching(models: Mapping[str, nn.Module]) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets the model and the module of the first output that is not finite."""
    found: list[tuple[str, str]] = []

    def look(called: str, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if not found and not all(each.isfinite().all() for each in _tensors(output)):
            found.append((called, name))

    handles = [
        module.register_forward_hook(partial(look, called, name))
        for called, model in models.items()
        for name, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a module's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)
