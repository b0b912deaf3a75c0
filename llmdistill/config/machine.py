"""Settings of the GPUs that a training is planned for."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmdistill.config.marks import OVER_0, SHARE_BELOW_1, SHARE_OVER_0, at_least
from llmdistill.errors import FieldError

_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

GpuName = Literal["a100", "a100-40gb", "h100", "h200", "b200", "l40s"]
# By the data sheets of the SXM modules, dense bf16. The L40S has no NVLink, so its GPUs talk over PCIe.
GPUS: dict[GpuName, dict[str, Any]] = {
    "a100": {"gpu_memory": "80GB", "tflops": 312.0, "memory_bandwidth": 2039.0, "nvlink": 300.0, "pcie": 25.0},
    "a100-40gb": {"gpu_memory": "40GB", "tflops": 312.0, "memory_bandwidth": 1555.0, "nvlink": 300.0, "pcie": 25.0},
    "h100": {"gpu_memory": "80GB", "tflops": 989.0, "memory_bandwidth": 3350.0, "nvlink": 450.0, "pcie": 50.0},
    "h200": {"gpu_memory": "141GB", "tflops": 989.0, "memory_bandwidth": 4800.0, "nvlink": 450.0, "pcie": 50.0},
    "b200": {"gpu_memory": "180GB", "tflops": 2250.0, "memory_bandwidth": 8000.0, "nvlink": 900.0, "pcie": 50.0},
    "l40s": {"gpu_memory": "48GB", "tflops": 362.0, "memory_bandwidth": 864.0, "nvlink": 25.0, "pcie": 25.0},
}
"""The figures of a kind of GPU, as settings of `MachineConfig`."""


def find_gpu(name: str, memory_bytes: int) -> GpuName | None:
    """Return the kind of a GPU by the name that its driver gives, such as NVIDIA H100 80GB HBM3; None if unknown."""
    words = re.split(r"[\s-]+", name.lower())
    kind = next((kind for kind in GPUS if kind in words), None)
    return "a100-40gb" if kind == "a100" and memory_bytes < 60e9 else kind  # between its two sizes


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The machine that a training is planned for; by default this machine.

    If its GPUs are not known, nodes of A100 with NVLink and InfiniBand.
    """

    gpu: GpuName = "a100"
    """Kind of the GPUs, which gives gpu_memory, tflops, memory_bandwidth, nvlink and pcie where they are not given."""
    gpus: int = field(default=8, metadata=at_least(0))
    """GPUs of each node; 0 is the CPU of this machine, whose memory and speed are measured where they are not given."""
    nodes: int = field(default=1, metadata=at_least(1))
    """Number of nodes."""
    gpu_memory: str = "80GB"
    """Memory of a GPU, or what is free beside a CPU, in MB, GB, TB (powers of ten) or MiB, GiB, TiB (powers of two)."""
    tflops: float = field(default=312.0, metadata=OVER_0)
    """Peak of a GPU's dense matrix products in the number format of the run, in TFLOP/s; bf16 by default."""
    product_share: float = field(default=0.6, metadata=SHARE_OVER_0)
    """Share of `tflops` that matrix products reach."""
    memory_bandwidth: float = field(default=2039.0, metadata=OVER_0)
    """Bandwidth of a GPU's memory in GB/s."""
    bandwidth_share: float = field(default=0.75, metadata=SHARE_OVER_0)
    """Share of each bandwidth that is reached."""
    nvlink: float = field(default=300.0, metadata=OVER_0)
    """Bandwidth between a GPU and the others of its node in one direction, in GB/s."""
    infiniband: float = field(default=25.0, metadata=OVER_0)
    """Bandwidth between the nodes in one direction, in GB/s for each GPU."""
    pcie: float = field(default=25.0, metadata=OVER_0)
    """Bandwidth between a GPU and the memory of its node in one direction, in GB/s, for offloading and a teacher's
    cache."""
    host_bandwidth: float = field(default=200.0, metadata=OVER_0)
    """Bandwidth of a node's memory in GB/s, which its GPUs share; only offloading uses it."""
    disk: float = field(default=2.0, metadata=OVER_0)
    """Bandwidth of each node's disk or shared file system in GB/s, which its GPUs share, for a teacher's cache."""
    cache_space: str = "1TB"
    """Room on that disk for a teacher's cache; a larger one is not proposed, nor one of more than a hundred times the
    bytes of the teacher, unless nothing else fits."""
    launch: float = field(default=6.0, metadata=at_least(0))
    """Time that the CPU takes to launch one operation on a GPU, in microseconds."""
    reserved: str = "2GB"
    """Memory of a GPU that no tensor can have: the CUDA context, and the buffers of NCCL and cuBLAS."""
    fragmentation: float = field(default=0.05, metadata=SHARE_BELOW_1)
    """Share of the tensors that the allocator holds in addition, because free blocks do not fit what is needed."""
    margin: float = field(default=0.1, metadata=SHARE_BELOW_1)
    """Share of a GPU's memory that a proposal leaves free where it can, because the forecast is not exact."""

    def __post_init__(self) -> None:
        for name in ("gpu_memory", "reserved", "cache_space"):
            parse_bytes(getattr(self, name), field=name)

    def of_kind(self, gpu: GpuName, given: Collection[str]) -> MachineConfig:
        """Return the machine with the figures of a kind of GPU, but for the settings that were given."""
        return replace(self, gpu=gpu, **{name: value for name, value in GPUS[gpu].items() if name not in given})

    @property
    def ranks_of_node(self) -> int:
        return max(1, self.gpus)  # one on a CPU

    @property
    def ranks(self) -> int:
        return self.ranks_of_node * self.nodes

    @property
    def memory_bytes(self) -> int:
        """The memory of a GPU in bytes."""
        return parse_bytes(self.gpu_memory, field="gpu_memory")

    @property
    def reserved_bytes(self) -> int:
        """The memory of a GPU that no tensor can have, in bytes."""
        return parse_bytes(self.reserved, field="reserved")


def parse_bytes(text: str, *, field: str) -> int:
    """Return the bytes that a text such as 80GB, 1.5 TB or 24GiB names; raises FieldError if it has another form."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)\s*", text, re.ASCII)
    units = {unit.upper(): size for unit, size in _UNITS.items()}
    size = None if match is None else float(match[1]) * units.get(match[2].upper(), 0)
    if not size:
        raise FieldError(f"{field} is {text!r}: give a number with one of the units {', '.join(_UNITS)}, such as 80GB")
    return round(size)
