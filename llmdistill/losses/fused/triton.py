"""Checks whether the Triton kernels of the fused losses can run on a device; only for a GPU does it import Triton."""

from __future__ import annotations

from functools import cache

import torch

OLDEST_TRITON = (3, 4)
"""The oldest Triton version that the kernels were compiled with: they take tuples, which older versions lack."""


@cache  # a loss asks for each batch
def available(device: torch.device | str) -> bool:
    """Return whether the kernels run on a device: CUDA of compute capability 8.0 (A100) or later, with Triton."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    # Import instead of asking importlib.metadata: builds of PyTorch bring Triton as packages of other names, and an
    # installed one may not load.
    try:
        import triton
    except ImportError:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST_TRITON
