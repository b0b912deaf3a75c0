"""The memory of a rank and the time of a step for one layout of the models on a machine, from numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from llmdistill.config.machine import MachineConfig
from llmdistill.planning.step import Moment, model_bytes
from llmdistill.runtime.tracing import Work
from llmdistill.step.lm_head import lm_head_parameters
from llmdistill.training.disk import STATE_BYTES

PARTS = {
    "teacher": ("the teacher's weights", "a smaller teacher, more GPUs"),
    "student": ("the student's weights", "a smaller student, more GPUs"),
    "gradients": ("the gradients", "more GPUs, or a smaller student"),
    "optimizer": ("the optimizer state", "more GPUs, or a smaller student"),
    "activations": ("the student's activations", "a smaller data.max_length"),
    "taps": (
        "the tensors that losses on layers compare (taps)",
        "a smaller data.max_length, or a method with terms on fewer layers",
    ),
    "head": ("the LM head with its losses", "a smaller data.max_length, or a smaller vocabulary"),
    "gathered": (
        "the weights that ZeRO-3 has gathered",
        "a smaller stage3_max_live_parameters in a ds_config of your own",
    ),
    "buckets": ("the buckets of the communication", "smaller buckets in a ds_config of your own"),
    "step": ("what only the optimizer's step needs", ""),
    "allocator": ("what the GPU and its allocator reserve", "a smaller --reserved"),
}
"""Part of the memory -> its description, and a remedy that makes it smaller."""
SHARDINGS = ("replicated", "node", "zero3")
"""Values of teacher.sharding that any teacher takes, the simplest first."""
TENSOR_PARALLEL = "tensor"
"""A teacher whose layers are cut across the ranks of a node."""
CACHED = "cached"
"""A teacher that is a file (teacher.cache)."""

_GRADIENT = 4
"""Bytes of a gradient in the optimizer's step, which is fp32."""
_TEMPORARY = 8
"""Bytes of AdamW's temporary tensors for each parameter, unless it is fused: the root of the second moment and the
update."""
_ADAM_BYTES = 44
"""Bytes that a fused AdamW reads and writes for each parameter, with the norm of the gradients and their cast."""
_HOST_ADAM_BYTES = 36
"""The same for DeepSpeed's Adam on the CPU, one pass: weight, gradient and two moments, three of them written."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the models of a run."""

    student_bytes: int
    """Bytes of the student's weights and buffers, as a rank without ZeRO-3 holds them."""
    element_bytes: int
    """Bytes of an element of the student: 2 in bf16."""
    trained: int
    """Number of elements that are trained."""
    teacher_bytes: int
    """Bytes of the teacher's weights and buffers; 0 without a teacher."""
    teacher_element_bytes: int
    teacher_head_bytes: int = 0
    """Bytes of the matrix of the teacher's LM head, which a sharded teacher gathers once and keeps."""
    cached_head_bytes: int = 0
    """Bytes of the LM head that takes the place of a cached teacher's weights; 0 without hidden states."""
    cut_bytes: int = 0
    """Bytes of the teacher's parameters of which the ranks of a node have shares, if it is cut (teacher.sharding
    tensor)."""

    @classmethod
    def of(cls, student: PreTrainedModel, teacher: PreTrainedModel | None, *, cached_head_bytes: int = 0) -> Sizes:
        """Count the sizes of models, which may be on the meta device."""
        return cls(
            student_bytes=model_bytes(student),
            element_bytes=student.dtype.itemsize,
            trained=sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad),
            teacher_bytes=model_bytes(teacher),
            teacher_element_bytes=0 if teacher is None else teacher.dtype.itemsize,
            teacher_head_bytes=0
            if teacher is None
            else sum(parameter.nbytes for parameter in lm_head_parameters(teacher)),
            cached_head_bytes=cached_head_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class Zero:
    """The part of a DeepSpeed configuration that decides about memory and communication."""

    stage: int
    buckets: int
    """Number of buckets that exist at the same time."""
    bucket_size: int
    """Elements of a bucket."""
    live: int
    """The most elements that ZeRO-3 keeps gathered."""
    prefetch: int
    """The most elements that ZeRO-3 gathers at the same time, which then exist twice."""
    sub_group: int
    """The most elements that ZeRO-3 updates at the same time."""
    fused: bool
    """Whether the optimizer is fused, so that it needs no temporary tensors."""
    offloads_optimizer: bool
    offloads_weights: bool

    @classmethod
    def of(cls, ds_config: Mapping[str, Any], *, accumulation_steps: int) -> Zero:
        """Read a DeepSpeed configuration; keys that it leaves out have DeepSpeed's defaults."""
        block, optimizer = (ds_config.get(name, {}) for name in ("zero_optimization", "optimizer"))
        settings = optimizer.get("params", {})
        stage = block.get("stage", 0)
        overlaps = block.get("overlap_comm", stage == 3)
        # DeepSpeed fills one bucket while it reduces the other.
        buckets = 2 if overlaps and stage < 3 else 1
        if stage == 2 and accumulation_steps > 1:
            buckets += 1  # the sums of earlier micro batches are views into a bucket of their own, which keep it alive

        def device(name: str) -> str:
            return str((block.get(name) or {}).get("device", "none"))

        return cls(
            stage=stage,
            buckets=buckets if stage > 0 else 0,
            bucket_size=int(block.get("reduce_bucket_size", 5e8)),
            live=int(block.get("stage3_max_live_parameters", 1e9)),
            prefetch=int(block.get("stage3_prefetch_bucket_size", 5e7)),
            sub_group=int(block.get("sub_group_size", 1e9)),
            fused=settings.get("fused", not settings.get("foreach", False)),
            offloads_optimizer=device("offload_optimizer") != "none",
            offloads_weights=device("offload_param") != "none",
        )

    def gathered_bytes(self, weights: int, element_bytes: int) -> int:
        """Return the most bytes of gathered weights under ZeRO-3, for a model with so many bytes of weights."""
        return sum(min(weights, elements * element_bytes) for elements in (self.live, self.prefetch))


TEACHER_ZERO = Zero.of({"zero_optimization": {"stage": 3}}, accumulation_steps=1)
"""The configuration of a sharded teacher, which has DeepSpeed's defaults."""


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
    def bound(self) -> str:
        """The field that most of the time goes to."""
        names = {"wire": self.wire, "launch": self.launch, "host": self.host}
        most = max(names, key=names.__getitem__)
        if self.compute + self.memory < names[most]:
            return most
        return "compute" if self.compute >= self.memory else "memory"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the models of a run lie on the ranks of a machine."""

    zero: Zero
    sizes: Sizes
    teacher: str | None
    """The value of teacher.sharding, or "cached"; None without a teacher."""
    machine: MachineConfig
    accumulation_steps: int = 1
    summed_bytes: float = 0
    """Bytes of activations that the ranks of a node add up in each micro batch, if the teacher is cut across them."""
    exchanged_bytes: float = 0
    """Bytes of the logits of a rank's positions in each micro batch, to which all ranks of the node contribute."""

    @property
    def sharers(self) -> int:
        """How many ranks share a whole teacher; 1 without a teacher."""
        machine = self.machine
        return {"node": machine.ranks_of_node, "zero3": machine.ranks}.get(self.teacher or "", 1)

    @property
    def resident_teacher(self) -> dict[str, float]:
        """The bytes of the teacher on a rank: its own weights and the gathered ones, or a cached one's head alone."""
        sizes = self.sizes
        if self.teacher == TENSOR_PARALLEL:
            return {"teacher": sizes.teacher_bytes - sizes.cut_bytes * (1 - 1 / self.machine.ranks_of_node)}
        if self.sharers == 1:
            return {"teacher": sizes.cached_head_bytes if self.teacher == CACHED else sizes.teacher_bytes}
        gathered = TEACHER_ZERO.gathered_bytes(sizes.teacher_bytes, sizes.teacher_element_bytes)
        return {"teacher": sizes.teacher_bytes / self.sharers, "gathered": gathered}

    @property
    def share(self) -> float:
        """The number of elements that a rank's optimizer updates."""
        return self.sizes.trained / (self.machine.ranks if self.zero.stage > 0 else 1)

    def peak_memory(self, moments: Sequence[Moment]) -> dict[str, float]:
        """Return the bytes of a rank by part, at the moment of a micro batch or of the step when most are in use."""
        zero, sizes, ranks = self.zero, self.sizes, self.machine.ranks
        sharded = zero.stage == 3 and (ranks > 1 or zero.offloads_weights)
        always: dict[str, float] = {
            "student": 0 if zero.offloads_weights else sizes.student_bytes / (ranks if sharded else 1),
            "gathered": zero.gathered_bytes(sizes.student_bytes, sizes.element_bytes) if sharded else 0,
            "optimizer": 0 if zero.offloads_optimizer else STATE_BYTES * self.share,
            "buckets": zero.buckets * zero.bucket_size * sizes.element_bytes,
        }
        if self.teacher is not None:
            for name, size in self.resident_teacher.items():
                always[name] = always.get(name, 0) + size
        phases = []
        for moment in moments:
            # Only the gradients of the rank's share stay; with an offloaded optimizer they are in the node's memory.
            if zero.stage >= 2:
                elements = 0 if zero.offloads_optimizer else self.share
            else:
                # With accumulation all gradients exist from the first micro batch on; without, they appear one after
                # the other.
                elements = sizes.trained if self.accumulation_steps > 1 else moment.gradients
            # Stage 2 without accumulation fills its share bucket by bucket during the backward pass.
            if zero.stage == 2 and self.accumulation_steps == 1:
                elements = min(elements, moment.gradients)
            phases.append({**moment.live, "gradients": elements * sizes.element_bytes})
        if not zero.offloads_optimizer:  # the step holds the gradients of the rank's share, and temporary tensors
            # ZeRO-3 updates one group of parameters after the other.
            at_once = min(self.share, zero.sub_group) if zero.stage == 3 else self.share
            step = at_once * (_GRADIENT + (0 if zero.fused else _TEMPORARY))
            phases.append({"gradients": self.share * sizes.element_bytes, "step": step})
        # The peak is that of one moment, so the maxima of the parts are not added up.
        largest = max(phases, key=lambda phase: sum(phase.values()))
        return self.reserved({name: always.get(name, 0) + largest.get(name, 0) for name in PARTS})

    def reserved(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the bytes by part with those that the GPU and its allocator reserve."""
        return {**parts, "allocator": self.machine.reserved_bytes + self.machine.fragmentation * sum(parts.values())}

    @property
    def wire_bytes(self) -> float:
        """The bytes that a rank sends in an optimizer step, for collectives that run in rings over all ranks.

        A ring sends (n - 1) / n of the data to reduce or gather it; an all-reduce does both. ZeRO-3 gathers the weights
        for the forward and for the backward pass of each micro batch, and a sharded teacher its own once.
        """
        gradients, weights = self.sizes.trained * self.sizes.element_bytes, self.sizes.student_bytes
        if self.zero.stage == 3:
            sent = self.accumulation_steps * (2 * weights + gradients)
        elif self.zero.stage == 2:
            # Reduced in each micro batch; the updated weights, as many bytes, are gathered once.
            sent = self.accumulation_steps * gradients + gradients
        else:
            # Once per step: an all-reduce, or reducing gradients and gathering weights.
            sent = 2 * gradients
        ranks = self.machine.ranks
        return (ranks - 1) / ranks * sent + (self._gathered_teacher_bytes if self.teacher == "zero3" else 0)

    @property
    def node_bytes(self) -> float:
        """The bytes that a rank sends in a step to the ranks of its node alone: those of a teacher of the node."""
        if self.teacher == TENSOR_PARALLEL:
            ranks, sent = self.machine.ranks_of_node, 2 * self.summed_bytes + self.exchanged_bytes
            return (ranks - 1) / ranks * self.accumulation_steps * sent  # an all-reduce sends twice
        return self._gathered_teacher_bytes if self.teacher == "node" else 0

    @property
    def _gathered_teacher_bytes(self) -> float:
        """The bytes that a rank sends for a shared teacher: all but the LM head, for each micro batch."""
        gathered = self.sizes.teacher_bytes - self.sizes.teacher_head_bytes
        return (self.sharers - 1) / self.sharers * self.accumulation_steps * gathered

    def step_duration(self, work: Work, *, read_bytes: float = 0) -> Duration:
        """Return the time of a step from the work of both models on a micro batch, and the bytes read from a cache."""
        zero, sizes, machine, steps = self.zero, self.sizes, self.machine, self.accumulation_steps
        share = sizes.trained / machine.ranks
        copied_bytes = 0.0
        if zero.offloads_optimizer:
            copied_bytes += share * sizes.element_bytes * (steps + 1)  # gradients down, weights up
        if zero.offloads_weights:
            copied_bytes += 2 * steps * sizes.student_bytes / machine.ranks  # up for the forward and the backward pass
        host = copied_bytes / _effective_bandwidth(machine, machine.pcie)
        if zero.offloads_optimizer:
            host += (
                # The ranks of a node share its memory bandwidth.
                _HOST_ADAM_BYTES * share * machine.ranks_of_node / _effective_bandwidth(machine, machine.host_bandwidth)
            )
        optimizer_bytes = 0 if zero.offloads_optimizer else _ADAM_BYTES * self.share
        return Duration(
            compute=steps * _time_products(work, machine),
            memory=(steps * work.other_bytes + optimizer_bytes)
            / _effective_bandwidth(machine, machine.memory_bandwidth),
            wire=self.sent_seconds(self.wire_bytes),
            launch=1e-6 * machine.launch * steps * work.operations,
            host=host + steps * read_seconds(read_bytes, machine),
        )

    def pass_seconds(self, work: Work) -> float:
        """Return the time of one forward pass of the teacher alone, on all ranks at the same time."""
        machine = self.machine
        memory = work.other_bytes / _effective_bandwidth(machine, machine.memory_bandwidth)
        sent = self.sent_seconds(self._gathered_teacher_bytes if self.teacher == "zero3" else 0.0)
        return max(_time_products(work, machine) + memory, sent, 1e-6 * machine.launch * work.operations)

    def sent_seconds(self, between: float) -> float:
        """Return the time in which a rank sends bytes over all ranks, and `node_bytes` within its node.

        Between nodes NCCL opens a ring for each network card, so the cards of a node work together; a ring is as fast
        as its slowest link.
        """
        machine = self.machine
        ring = min(machine.nvlink, machine.ranks_of_node * machine.infiniband) if machine.nodes > 1 else machine.nvlink
        return between / _effective_bandwidth(machine, ring) + self.node_bytes / _effective_bandwidth(
            machine, machine.nvlink
        )


def read_seconds(size: float, machine: MachineConfig) -> float:
    """Return the time in which each rank reads so many bytes of a cache, from the disk of its node to its GPU."""
    return size * (
        machine.ranks_of_node / _effective_bandwidth(machine, machine.disk)  # shared by the ranks of a node
        + 1 / _effective_bandwidth(machine, machine.pcie)  # one link for each GPU
    )


def _time_products(work: Work, machine: MachineConfig) -> float:
    """Return the time of matrix products; a product of small matrices waits for the memory."""
    peak = 1e12 * machine.tflops * machine.product_share  # FLOP/s that products reach in practice
    return max(work.flops / peak, work.product_bytes / _effective_bandwidth(machine, machine.memory_bandwidth))


def _effective_bandwidth(machine: MachineConfig, gigabytes: float) -> float:
    """Return the bytes per second that a bandwidth in GB/s reaches in practice."""
    return 1e9 * gigabytes * machine.bandwidth_share


def shardings(machine: MachineConfig) -> list[str]:
    """Return the values of teacher.sharding that differ from the simpler ones on a machine."""
    differs = {"node": machine.nodes > 1 and machine.ranks_of_node > 1, "zero3": machine.ranks > 1}
    return [sharding for sharding in SHARDINGS if differs.get(sharding, True)]
