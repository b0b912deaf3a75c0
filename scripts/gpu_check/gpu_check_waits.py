"""Where the host waits for the device: on CUDA torch says so, on a CPU it is where a tensor's value is asked for."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Stack = tuple[str, ...]
"""file:function of each frame, the innermost last."""

ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
ORIGINS = ("llmdistill/losses", "llmdistill", "transformers", "deepspeed")
"""The folders of code whose waits are told apart, inner folders first."""


@contextmanager
def watch(device: torch.device) -> Iterator[set[Stack]]:
    """Collects, within its block, where the host waits for a device.

    On CUDA by torch's own warnings; what NCCL and events wait for is not among them.
    """
    if device.type != "cuda":
        with AskedValues() as asked:
            yield asked.places
        return
    places: set[Stack] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            places.add(_stack())

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # is called where the warning arises
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _stack() -> Stack:
    return tuple(f"{frame.filename}:{frame.name}" for frame in traceback.extract_stack())


class AskedValues(TorchDispatchMode):
    """Collects where the value of a tensor is asked for, on any device: a GPU would be waited for there."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[Stack] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            self.places.add(_stack())
        return func(*args, **(kwargs or {}))


@cache
def _folders() -> dict[str, str]:
    parts = {name: name.split("/") for name in ORIGINS}
    places = {name: Path(str(import_module(library).__file__)).parent for name, (library, *_) in parts.items()}
    return {name: f"{place.joinpath(*parts[name][1:])}/" for name, place in places.items()}


def origin(place: Stack) -> tuple[str | None, str]:
    """Which of ORIGINS the wait began in, by its innermost frame there, and this frame; None for none of them."""
    for frame in reversed(place):
        for name, folder in _folders().items():
            if frame.startswith(folder):
                return name, f"{name}/{frame.removeprefix(folder)}"
    return None, Path(place[0]).name


def is_norm(place: Stack) -> bool:
    """Whether DeepSpeed's engine looks at the norm of the gradients there, before it updates the weights."""
    return origin(place)[0] == "deepspeed" and any(frame.endswith(":_take_model_step") for frame in place)
