"""The CPU of this machine as a machine that a training is planned for: one rank, with what was measured."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import psutil
import torch

_SIDE = 1024
"""Rows and columns of the matrices whose product is timed."""
_COPIED = 2**24
"""Numbers that are copied for the bandwidth: 64 MiB, more than a cache holds."""


def measure_cpu() -> dict[str, Any]:
    """Return settings of `MachineConfig`, measured in fp32 with the threads that a run would have; it takes a second.

    The memory is what other programs leave free, and the room for a cache is that of the current folder's disk.
    """
    left, right, numbers = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE), torch.zeros(_COPIED)
    target = torch.empty_like(numbers)
    return {
        "gpu_memory": f"{psutil.virtual_memory().available / 1e9:.1f}GB",
        "tflops": 2e-12 * _SIDE**3 / _seconds(lambda: left @ right),
        "memory_bandwidth": 1e-9 * 2 * numbers.nbytes / _seconds(lambda: target.copy_(numbers)),
        "cache_space": f"{shutil.disk_usage('.').free / 1e9:.1f}GB",
        "reserved": "1GB",  # Python with torch, transformers and DeepSpeed
    }


def _seconds(work: Callable[[], object]) -> float:
    """The median of some tries: a run has the machine to itself no more than they have."""
    found = []
    for _ in range(9):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return median(found)
