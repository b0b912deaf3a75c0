"""What a machine has: its device, the number formats that suit it, a compiler, and libraries."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, cast

import torch

TORCH_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def give_back_memory() -> None:
    """Give the memory of freed tensors back to the system: glibc keeps what lies between blocks that are in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def choose_accelerator() -> None:
    """Tell DeepSpeed that a machine without a GPU computes on its CPU; otherwise it warns of that when it is loaded."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def choose_dtype(setting: Literal["auto", "fp32", "bf16"], device: torch.device) -> Literal["fp32", "bf16"]:
    """Return the dtype that a setting names; auto is bf16 on a GPU that supports it, else fp32."""
    if setting != "auto":
        return setting
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def emulates_bf16() -> bool:
    """Return whether this processor multiplies in bf16 by conversions, as an x86 one without AVX-512 BF16 or AMX."""
    read = getattr(torch.cpu, "get_capabilities", None)  # new in PyTorch 2.12
    has = {} if read is None else read()
    return has.get("architecture") == "x86_64" and not (has.get("avx512_bf16") or has.get("amx_bf16"))


def emulation_warning(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return a warning of bf16 on a processor that emulates it, else None; for a run, as a plan is for any machine."""
    if dtype != torch.bfloat16 or device.type != "cpu" or not emulates_bf16():
        return None
    return (
        "this processor has no instructions for bf16 and emulates its products, some ten times slower than fp32: set "
        "train.dtype to fp32"
    )


def has_compiler(*more: str) -> bool:
    """Return whether there is a C++ compiler: $CXX, c++, g++ or another one that the caller accepts."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "c++", "g++", *more))


def free_memory(device: torch.device) -> None:
    """Free objects that refer to each other, as engines do, and return the memory of the GPU that nothing uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def installed_versions(libraries: Sequence[str]) -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    versions = {}
    for name in libraries:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def to_device_later(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a tensor of the CPU to a device; on a GPU the host waits neither for the copy nor for earlier work.

    The work that is queued from now on sees the values.
    """
    # From memory that is not pinned the driver may wait for the device first.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host_later(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """Begin to copy a vector to the host; the returned function waits for it and returns its values.

    On a GPU the host waits only for the work that was queued before the copy, not for later work.
    """
    if tensor.device.type != "cuda":
        return tensor.tolist
    # A copy to memory that is not pinned would make the host wait at once.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return cast(list[float], host.tolist())

    return wait
