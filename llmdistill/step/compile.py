"""torch.compile for the layers of tapped models.

Each layer becomes one graph (per mode and kind of mask), which returns the layer's output and the hidden tensors that
the recorder requests from this layer. The recorder uses these tensors outside the graph, so that no hook breaks the
graph: losses run between two layers instead of inside a layer. The head, the embedding and the losses are not compiled;
they are single kernels already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from llmdistill.errors import UserError
from llmdistill.internals.torch_names import has_triton, mark_dynamic, tree_leaves
from llmdistill.internals.transformers_names import checkpointing_function
from llmdistill.models.families import layers_of
from llmdistill.runtime.devices import has_compiler
from llmdistill.step.packed import has_kernel
from llmdistill.step.taps import Recorder


def check_compilers(device: torch.device) -> None:
    """Raise a UserError if a compiler is missing on this machine."""
    if device.type == "cuda" and not has_triton():
        raise UserError("train.compile is true, but Triton is missing: install it, or set train.compile to false")
    if not has_compiler("clang++"):
        raise UserError(
            "train.compile is true, but no C++ compiler was found: install one (Debian and Ubuntu: apt-get install "
            "g++), or set train.compile to false"
        )


def compile_layers(recorder: Recorder, *, backend: str = "inductor") -> None:
    """Compile the layers of a recorder's model in place; call this function last, after the recorder is created.

    A layer is compiled at its first run, which takes seconds, and again if the kind of its input changes (with or
    without mask, with or without gradient, one sequence or several), but not if only the size changes. The compiled
    layer runs whenever a tensor may be recorded or a gradient computed. Generation and scoring run the original layer,
    because their cache grows by one token per call. So do packed rows where each sequence is a call of its own: a graph
    of these calls would fit one batch alone. The results equal those of the original layers up to rounding and, with
    dropout, other random numbers.
    """
    for layer in layers_of(recorder.model):
        assert "forward" not in vars(layer), "the layers are compiled already"
        # The method is set on the instance, so that the hooks around the call are kept.
        layer.forward = _compile_layer(layer, recorder, backend)


def _compile_layer(layer: nn.Module, recorder: Recorder, backend: str) -> Callable[..., Any]:
    original = cast("Callable[..., Any]", layer.forward)
    function = type(layer).forward
    # Since about 5.2 transformers wraps the forward function in activation checkpointing; earlier releases wrap the
    # call of the module, which needs no change.
    checkpoints = function.__code__.co_name == "forward_with_checkpointing"
    plain = (vars(function)["__wrapped__"] if checkpoints else function).__get__(layer)

    def trace_layer(*args: Any, **kwargs: Any) -> Any:
        return recorder.collect(plain, *args, **kwargs)

    # torch limits the number of graphs per code object, so each layer gets its own code object.
    layer_function = FunctionType(trace_layer.__code__.replace(), globals(), "layer", None, trace_layer.__closure__)
    compiled = torch.compile(layer_function, backend=backend)

    def run_compiled(hidden_BTW: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Only sizes that change are marked: with `dynamic=True` for all of them, compilation takes four times as long.
        sizes = hidden_BTW.shape[:2]
        for dim in (0, 1):
            mark_dynamic(hidden_BTW, dim)
        for tensor in tree_leaves((args, kwargs)):
            if torch.is_tensor(tensor):  # masks (B, 1, T, T), positions and rotary embeddings (B or 1, T, ...)
                for dim, size in enumerate(tensor.shape):
                    if size in sizes:
                        mark_dynamic(tensor, dim)
        return compiled(hidden_BTW, *args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_by_sequence = kwargs.get("sequences") is not None and not has_kernel(args[0])
        if is_by_sequence or not (torch.is_grad_enabled() or recorder.is_recording):
            return original(*args, **kwargs)
        if checkpoints and layer.training and getattr(layer, "gradient_checkpointing", False):
            checkpoint = cast("Callable[..., Any]", checkpointing_function(layer))
            result, collected = checkpoint(partial(run_compiled, **kwargs), *args)
        else:
            result, collected = run_compiled(*args, **kwargs)
        recorder.record(collected)
        return result

    return forward
