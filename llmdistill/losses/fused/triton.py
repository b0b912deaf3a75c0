"""Checks whether the Triton kernels of the fused losses can run on a device. This module does not import Triton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

OLDEST_TRITON = (3, 4)
"""The oldest Triton version that the kernels were compiled with: they take tuples, which older versions lack."""


def available(device: torch.device | str) -> bool:
    """Whether the kernels run on a device: CUDA of compute capability 8.0 (A100) or later, and Triton installed."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return _has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def _has_triton() -> bool:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return False
    major, minor = found.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST_TRITON
