"""The time of a training step on a machine, and what bounds it, from numbers alone; the numbers of this CPU."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from torch.utils.benchmark import Timer

from llmdistill.config.machine import MachineConfig
from llmdistill.run.forecast.memory import Sizes, Zero
from llmdistill.runtime.tracing import Work

Bound = Literal["compute", "memory", "wire", "launch", "host"]
"""What takes most of a step: matrix products; the bandwidth of the GPU's memory; communication; the CPU that launches
operations; offloading to the node's memory, or the reading of a teacher's cache."""

_ADAM_BYTES = 44
"""Bytes that a fused AdamW reads and writes for each parameter, with the norm of the gradients and their cast."""
_HOST_ADAM_BYTES = 36
"""The same for DeepSpeed's Adam on the CPU, one pass: weight, gradient and two moments, three of them written."""


@dataclass(frozen=True, kw_only=True)
class Duration:
    """The seconds of one optimizer step on each rank."""

    compute: float
    """Matrix products."""
    memory: float
    """All other operations, the optimizer included, which wait for the GPU's memory."""
    wire: float
    """Communication, which overlaps with the two above."""
    launch: float
    """The CPU, which launches the operations of the two above while they run."""
    host: float
    """Offloading: copies to and from the node's memory, and the optimizer there. Also the reading of a teacher's
    cache."""

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return max(self.compute + self.memory, self.wire, self.launch) + self.host

    @property
    def bound(self) -> Bound:
        """What most of the time goes to."""
        work = self.compute + self.memory
        most = max(work, self.wire, self.launch, self.host)
        if most == work:
            return "compute" if self.compute >= self.memory else "memory"
        names: dict[Bound, float] = {"wire": self.wire, "launch": self.launch, "host": self.host}
        return next(name for name, seconds in names.items() if seconds == most)


def step_duration(
    zero: Zero,
    sizes: Sizes,
    teacher: str | None,
    work: Work,
    machine: MachineConfig,
    *,
    accumulation_steps: int,
    read_bytes: float = 0,
) -> Duration:
    """Return the time of an optimizer step.

    `teacher` is the value of teacher.sharding, or "cached", and None without a teacher; `work` is what both models do
    for one micro batch, for which `read_bytes` are read from a teacher's cache.
    """
    bandwidth = _reached(machine, machine.memory_bandwidth)
    share = sizes.trained / machine.ranks
    on_gpu = 0 if zero.offloads_optimizer else _ADAM_BYTES * (share if zero.stage > 0 else sizes.trained)
    between = wire_bytes(zero, sizes, teacher, machine.ranks, accumulation_steps=accumulation_steps)
    within = node_bytes(sizes, teacher, machine.ranks_of_node, accumulation_steps=accumulation_steps)
    copied = 0.0
    if zero.offloads_optimizer:
        copied += share * sizes.element_bytes * (accumulation_steps + 1)  # gradients down, weights up
    if zero.offloads_weights:
        copied += 2 * accumulation_steps * sizes.student_bytes / machine.ranks
    host = copied / _reached(machine, machine.pcie)
    if zero.offloads_optimizer:
        host += _HOST_ADAM_BYTES * share * machine.ranks_of_node / _reached(machine, machine.host_bandwidth)
    return Duration(
        compute=accumulation_steps * _product_seconds(work, machine),
        memory=(accumulation_steps * work.other_bytes + on_gpu) / bandwidth,
        wire=between / _reached(machine, wire_bandwidth(machine)) + within / _reached(machine, machine.nvlink),
        launch=1e-6 * machine.launch * accumulation_steps * work.operations,
        host=host + accumulation_steps * read_seconds(read_bytes, machine),
    )


def pass_seconds(sizes: Sizes, teacher: str, work: Work, machine: MachineConfig) -> float:
    """Return the time of one forward pass of the teacher alone, on all ranks at the same time."""
    memory = work.other_bytes / _reached(machine, machine.memory_bandwidth)
    gathered = _teacher_bytes(sizes, machine.ranks, 1) if teacher == "zero3" else 0.0
    within = node_bytes(sizes, teacher, machine.ranks_of_node, accumulation_steps=1)
    sent = gathered / _reached(machine, wire_bandwidth(machine)) + within / _reached(machine, machine.nvlink)
    return max(_product_seconds(work, machine) + memory, sent, 1e-6 * machine.launch * work.operations)


def read_seconds(size: float, machine: MachineConfig) -> float:
    """Return the time in which each rank reads so many bytes of a cache, from the disk of its node to its GPU."""
    return size * (machine.ranks_of_node / _reached(machine, machine.disk) + 1 / _reached(machine, machine.pcie))


def _product_seconds(work: Work, machine: MachineConfig) -> float:
    """The time of matrix products; one of small matrices waits for the memory."""
    peak = 1e12 * machine.tflops * machine.product_share
    return max(work.flops / peak, work.product_bytes / _reached(machine, machine.memory_bandwidth))


def wire_bytes(zero: Zero, sizes: Sizes, teacher: str | None, ranks: int, *, accumulation_steps: int) -> float:
    """Return the bytes that a rank sends in an optimizer step, for collectives that run in rings over all ranks.

    A ring sends (n - 1) / n of the data to reduce or gather it; an all-reduce does both. ZeRO-3 gathers the weights for
    the forward and for the backward pass of each micro batch, and a sharded teacher its own once.
    """
    gradients, weights = sizes.trained * sizes.element_bytes, sizes.student_bytes
    if zero.stage == 3:
        sent = accumulation_steps * (2 * weights + gradients)
    elif zero.stage == 2:
        sent = accumulation_steps * gradients + gradients
    else:
        sent = 2 * gradients
    gathered = _teacher_bytes(sizes, ranks, accumulation_steps) if teacher == "zero3" else 0
    return (ranks - 1) / ranks * sent + gathered


def node_bytes(sizes: Sizes, teacher: str | None, gpus: int, *, accumulation_steps: int) -> float:
    """Return the bytes that a rank sends in a step to the ranks of its node alone: those of a teacher of the node."""
    return _teacher_bytes(sizes, gpus, accumulation_steps) if teacher == "node" else 0


def _teacher_bytes(sizes: Sizes, sharers: int, accumulation_steps: int) -> float:
    """The bytes that a rank sends so that each of the ranks that share a teacher has gathered all but its LM head."""
    return (sharers - 1) / sharers * accumulation_steps * (sizes.teacher_bytes - sizes.teacher_head_bytes)


def wire_bandwidth(machine: MachineConfig) -> float:
    """Return the bandwidth of a ring over all GPUs in GB/s: that of its slowest link.

    Between nodes NCCL opens a ring for each network card, so the cards of a node work together.
    """
    if machine.nodes == 1:
        return machine.nvlink
    return min(machine.nvlink, machine.ranks_of_node * machine.infiniband)


def _reached(machine: MachineConfig, gigabytes: float) -> float:
    """Bytes per second of a bandwidth in GB/s."""
    return 1e9 * gigabytes * machine.bandwidth_share


def measure_cpu() -> dict[str, Any]:
    """Return settings of `MachineConfig`, measured in fp32 with the threads that a run would have; it takes a second.

    The memory is what other programs leave free, and the room for a cache is that of the current folder's disk.
    """
    side = 1024
    left, right = torch.randn(2, side, side)
    numbers = torch.zeros(2**24)  # 64 MiB, more than a cache holds

    def seconds(work: str) -> float:
        timer = Timer(work, globals=values, num_threads=torch.get_num_threads())
        return float(timer.blocked_autorange(min_run_time=0.2).median)

    values = {"left": left, "right": right, "numbers": numbers, "target": torch.empty_like(numbers)}
    return {
        "gpu_memory": f"{psutil.virtual_memory().available / 1e9:.1f}GB",
        "tflops": 2e-12 * side**3 / seconds("left @ right"),
        "memory_bandwidth": 1e-9 * 2 * numbers.nbytes / seconds("target.copy_(numbers)"),
        "cache_space": f"{shutil.disk_usage('.').free / 1e9:.1f}GB",
        "reserved": "1GB",  # Python with torch, transformers and DeepSpeed
    }
