"""The memory of a rank, by part, for a ZeRO stage and a teacher: pure functions over numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from llmdistill.models.heads import lm_head_parameters
from llmdistill.run.forecast.step import Moment, model_bytes, trained_parameters

PARTS = {
    "teacher": "the teacher's weights",
    "student": "the student's weights",
    "gradients": "the gradients",
    "optimizer": "the optimizer state",
    "activations": "the student's activations",
    "taps": "the tensors that losses on layers compare (taps)",
    "head": "the LM head with its losses",
    "gathered": "the weights that ZeRO-3 has gathered",
    "buckets": "the buckets of the communication",
    "step": "what only the optimizer's step needs",
    "allocator": "what the GPU and its allocator reserve",
}
"""Part of the memory -> what it is."""

_STATE = 12
"""Bytes of the optimizer state for each parameter: fp32 weights and two moments (AdamW)."""
_GRADIENT = 4
"""Bytes of a gradient in the optimizer's step, which is fp32."""
_TEMPORARY = 8
"""Bytes of AdamW's temporary tensors for each parameter, unless it is fused: the root of the second moment and the
update."""


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

    @classmethod
    def of(cls, student: PreTrainedModel, teacher: PreTrainedModel | None, *, cached_head_bytes: int = 0) -> Sizes:
        """Count the sizes of models, which may be on the meta device."""
        return cls(
            student_bytes=model_bytes(student),
            element_bytes=student.dtype.itemsize,
            trained=trained_parameters(student),
            teacher_bytes=model_bytes(teacher),
            teacher_element_bytes=0 if teacher is None else teacher.dtype.itemsize,
            teacher_head_bytes=0 if teacher is None else sum(each.nbytes for each in lm_head_parameters(teacher)),
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
        """Read a DeepSpeed configuration; what it leaves out has DeepSpeed's defaults."""
        block, optimizer = (ds_config.get(name, {}) for name in ("zero_optimization", "optimizer"))
        settings = optimizer.get("params", {})
        stage = block.get("stage", 0)
        overlaps = block.get("overlap_comm", stage == 3)
        buckets = 2 if overlaps and stage < 3 else 1
        if stage == 2 and accumulation_steps > 1:
            buckets += 1  # the sums of the micro batches before are views into their bucket

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


TEACHERS = ("replicated", "node", "zero3")
"""Values of teacher.sharding, the simplest first."""

CACHED = "cached"
"""A teacher that is a file (teacher.cache)."""


def teacher_sharers(teacher: str | None, *, ranks: int, ranks_of_node: int) -> int:
    """Return how many ranks share a whole teacher; 1 without a teacher."""
    return {"node": ranks_of_node, "zero3": ranks}.get(teacher or "", 1)


def resident_teacher(sizes: Sizes, teacher: str, sharers: int) -> dict[str, float]:
    """Return the bytes of the teacher's weights on a rank: its own, and those that it has gathered.

    A cached teacher has its head alone, whole on every rank.
    """
    if teacher == CACHED:
        return {"teacher": sizes.cached_head_bytes}
    if sharers == 1:
        return {"teacher": sizes.teacher_bytes}
    gathered = TEACHER_ZERO.gathered_bytes(sizes.teacher_bytes, sizes.teacher_element_bytes)
    return {"teacher": sizes.teacher_bytes / sharers, "gathered": gathered}


def step_memory(zero: Zero, sizes: Sizes, ranks: int) -> dict[str, float]:
    """Return the bytes that only the optimizer's step needs, by part.

    These are the gradients of the rank's share, in their own dtype and in fp32, and the optimizer's temporary tensors.
    """
    if zero.offloads_optimizer:
        return {}
    share = sizes.trained / (ranks if zero.stage > 0 else 1)
    at_once = min(share, zero.sub_group) if zero.stage == 3 else share
    temporary = 0 if zero.fused else _TEMPORARY
    return {"gradients": share * sizes.element_bytes, "step": at_once * (_GRADIENT + temporary)}


def peak_memory(
    zero: Zero,
    sizes: Sizes,
    teacher: str | None,
    moments: Sequence[Moment],
    *,
    ranks: int,
    accumulation_steps: int,
    ranks_of_node: int | None = None,
) -> dict[str, float]:
    """Return the bytes of a rank by part, at the moment of a step when most are in use; the allocator is left out.

    `teacher` is the value of teacher.sharding, or "cached", and None without a teacher; `moments` are those of a micro
    batch. Without `ranks_of_node` there is one node.
    """
    sharded = zero.stage == 3 and (ranks > 1 or zero.offloads_weights)
    always: dict[str, float] = {
        "student": 0 if zero.offloads_weights else sizes.student_bytes / (ranks if sharded else 1),
        "gathered": zero.gathered_bytes(sizes.student_bytes, sizes.element_bytes) if sharded else 0,
        "optimizer": 0 if zero.offloads_optimizer else _STATE * sizes.trained / (ranks if zero.stage > 0 else 1),
        "buckets": zero.buckets * zero.bucket_size * sizes.element_bytes,
    }
    if teacher is not None:
        sharers = teacher_sharers(teacher, ranks=ranks, ranks_of_node=ranks_of_node or ranks)
        for name, size in resident_teacher(sizes, teacher, sharers).items():
            always[name] = always.get(name, 0) + size

    def gradients(complete: int) -> float:
        """The bytes of the gradients when those of so many elements of a micro batch are there."""
        if zero.stage >= 2:
            own = 0 if zero.offloads_optimizer else sizes.trained / ranks
        else:
            own = sizes.trained if accumulation_steps > 1 else complete
        if zero.stage == 2 and accumulation_steps == 1:
            own = min(own, complete)
        return own * sizes.element_bytes

    phases: list[dict[str, float]] = [{**moment.live, "gradients": gradients(moment.gradients)} for moment in moments]
    phases.append(step_memory(zero, sizes, ranks))
    largest = max(phases, key=lambda phase: sum(phase.values()))
    return {name: always.get(name, 0) + largest.get(name, 0) for name in PARTS if name != "allocator"}


def with_allocator(parts: Mapping[str, float], *, reserved: int, fragmentation: float) -> dict[str, float]:
    """Return the bytes by part with those that the GPU and its allocator reserve."""
    return {**parts, "allocator": reserved + fragmentation * sum(parts.values())}
