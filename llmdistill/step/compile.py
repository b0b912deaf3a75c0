"""torch.compile for the layers of tapped models.

Layers of one kind share one graph (per mode and kind of mask), which returns the layer's output and the hidden tensors
that the recorder requests from these layers. The recorder uses these tensors outside the graph, so that no hook breaks
the graph: losses run between two layers instead of inside a layer. The head, the embedding and the losses are not
compiled; they are single kernels already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from llmdistill.errors import UserError
from llmdistill.internals.torch_names import copy_module, has_triton, mark_dynamic, own_tensors, tree_leaves
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

    A kind of layer is compiled at its first run, which takes seconds, and again if the kind of its input changes (with
    or without mask, with or without gradient, one sequence or several), but not if only the size changes. The compiled
    layer runs whenever a tensor may be recorded or a gradient computed. Generation and scoring run the original layer,
    because their cache grows by one token per call. So do packed rows where each sequence is a call of its own: a graph
    of these calls would fit one batch alone. The results equal those of the original layers up to rounding and, with
    dropout, other random numbers.
    """
    kinds: dict[Any, tuple[int, Callable[..., Any]]] = {}
    for index, layer in enumerate(layers_of(recorder.model)):
        assert "forward" not in vars(layer), "the layers are compiled already"
        kind = (recorder.aspects_of(index), *_describe(layer, recorder.model))
        if kind not in kinds:
            kinds[kind] = index, _compile_kind(layer, recorder, backend)
        # The method is set on the instance, so that the hooks around the call are kept.
        layer.forward = _run_by(kinds[kind][1], layer, index, recorder)


class _Body(nn.Module):
    """The computation of a layer, without the hooks and the checkpointing around its call."""

    def __init__(self, layer: nn.Module, recorder: Recorder) -> None:
        super().__init__()
        # With the tensors of the layer itself the graph would depend on whether its inputs are those.
        self.layer = _without_tensors(layer)
        self._plain, self._recorder = _plain_forward(self.layer), recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._recorder.collect(self._plain, *args, **kwargs)


def _without_tensors(module: nn.Module) -> nn.Module:
    """Return a copy of a module that has its hooks, and tensors without memory."""
    return copy_module(module, _to_meta, _without_tensors)


def _to_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _describe(layer: nn.Module, model: nn.Module) -> tuple[Any, ...]:
    """Return what distinguishes the graph of a layer from those of others: its modules, plain settings and tensors."""
    # GPT-2 may divide the scores of a layer by its number.
    reads_index = getattr(model.config, "scale_attn_by_inverse_layer_idx", False)
    described: list[Any] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and (reads_index or key != "layer_idx")
        }
        tensors = [
            (key, tensor.shape, tensor.dtype, tensor.requires_grad, type(tensor))
            for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]
        described.append((name, type(module), tuple(sorted(settings.items())), tuple(tensors)))
    return tuple(described)


def _has_checkpointing(layer: nn.Module) -> bool:
    """Whether the forward function of a layer is wrapped in activation checkpointing.

    Since about 5.2 transformers wraps the forward function; earlier releases wrap the call of the module, which needs
    no change.
    """
    return type(layer).forward.__code__.co_name == "forward_with_checkpointing"


def _plain_forward(layer: nn.Module) -> Callable[..., Any]:
    function = type(layer).forward
    plain = vars(function)["__wrapped__"] if _has_checkpointing(layer) else function
    return cast("Callable[..., Any]", plain.__get__(layer))


def _compile_kind(layer: nn.Module, recorder: Recorder, backend: str) -> Callable[..., Any]:
    """Return the compiled function of all layers of one kind: it takes the tensors of a layer and its inputs.

    The graph is that of the layer given here, with tensors of others in the place of its own.
    """
    body = _Body(layer, recorder)

    def trace_layer(tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(body, tensors, args, kwargs)

    # torch limits the number of graphs per code object, so each kind gets its own code object.
    function = FunctionType(trace_layer.__code__.replace(), globals(), "layer", None, trace_layer.__closure__)
    return cast("Callable[..., Any]", torch.compile(function, backend=backend))


def _run_by(compiled: Callable[..., Any], layer: nn.Module, index: int, recorder: Recorder) -> Callable[..., Any]:
    """Return the forward function of a layer that runs the compiled function of its kind."""
    original = cast("Callable[..., Any]", layer.forward)
    checkpoints = _has_checkpointing(layer)
    # Where the tensors are, as those of a module may be replaced.
    owners = [
        (f"layer.{path}.{name}" if path else f"layer.{name}", owned, name)
        for path, module in layer.named_modules()
        for owned in own_tensors(module)
        for name, tensor in owned.items()
        if tensor is not None
    ]

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
        return compiled({key: owned[name] for key, owned, name in owners}, hidden_BTW, *args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_by_sequence = kwargs.get("sequences") is not None and not has_kernel(args[0])
        if is_by_sequence or not (torch.is_grad_enabled() or recorder.is_recording):
            return original(*args, **kwargs)
        if checkpoints and layer.training and getattr(layer, "gradient_checkpointing", False):
            checkpoint = cast("Callable[..., Any]", checkpointing_function(layer))
            result, collected = checkpoint(partial(run_compiled, **kwargs), *args)
        else:
            result, collected = run_compiled(*args, **kwargs)
        # The graph has the number of the layer from which it was made.
        recorder.record([tapped._replace(layer=index) for tapped in collected])
        return result

    return forward
