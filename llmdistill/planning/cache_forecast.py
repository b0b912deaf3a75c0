"""The cache of a teacher's outputs in a forecast: its contents, a step that reads it, its size and build time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs, Positions
from llmdistill.config.machine import MachineConfig, parse_bytes
from llmdistill.config.teacher import CacheConfig
from llmdistill.methods import Method
from llmdistill.planning.layout import SHARDINGS, TEACHER_ZERO, Layout, Sizes, read_seconds
from llmdistill.planning.step import ForecastModels, full_batch
from llmdistill.runtime.tracing import Tracer, Work, on_gpu
from llmdistill.step.tap_models import tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.cache.folder import CACHE_FILE, read_cache_record
from llmdistill.teachers.rows import Request, row_positions, to_outputs, to_rows
from llmdistill.training.checks import check_top_k
from llmdistill.training.plan import Plan

Counts = Mapping[Positions, int]
"""The number of positions of each kind in a batch or a training set."""
_INDEX = 8 * (1 + len(POSITIONS))
"""Bytes of an example's entries in a shard: its id, and where its rows of each kind begin."""
_MOST_TEACHERS = 100
"""A cache is not proposed if it takes more than so many times the bytes of the teacher."""


@dataclass(frozen=True, kw_only=True)
class CacheTrace(Teacher):
    """The contents of a cache for a micro batch; in a traced step it is the teacher that reads the cache."""

    settings: CacheConfig
    request: Request
    rows: Mapping[str, Tensor]
    """The kept tensors of one micro batch, on the meta device, by the names of `teachers.rows`."""
    head: HeadInputs | None
    """The LM head that a training from the cache loads; None if the cache needs none."""
    scaling: Mapping[int, float]
    micro_batch: Counts
    """The micro batch that was traced."""
    work: Work
    """The teacher's pass over it."""
    peak: float
    """The bytes of this pass above the teacher's weights."""

    @property
    def head_bytes(self) -> int:
        """The bytes of the LM head that a training from the cache loads."""
        tensors = () if self.head is None else (self.head.weight, self.head.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def row_bytes(self, counts: Counts) -> int:
        """Return the bytes of the rows of so many positions, which a training reads once an epoch."""
        return sum(
            counts[row_positions(name)] * rows[:1].numel() * rows.element_size() for name, rows in self.rows.items()
        )

    def shard_bytes(self, counts: Counts) -> int:
        """Return the bytes of the shards of so many positions, without their headers of some hundred bytes each."""
        return self.row_bytes(counts) + _INDEX * counts["sequences"]

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the outputs for a batch on the meta device, made as `CachedTeacher` makes them."""
        counts = count_positions(batch)

        def read(name: str) -> Tensor:
            rows = self.rows[name]
            return rows.new_empty(counts[row_positions(name)], *rows.shape[1:])

        return to_outputs(
            read, batch, self.request, top_k=self.settings.stored_top_k, head=self.head, scaling=self.scaling
        )


@dataclass(frozen=True, kw_only=True)
class CacheRequest:
    """The cache that a run may read; teacher.cache, if the run sets it, takes precedence."""

    folder: str = "cache"
    settings: CacheConfig = field(default_factory=CacheConfig)
    counts: Counts | None = None
    """The training set, if it was counted."""


@dataclass(frozen=True, kw_only=True)
class CacheForecast:
    """The cache of a run, its size, and its build time."""

    folder: str
    settings: CacheConfig
    is_there: bool
    """Whether the cache is there already."""
    sharding: str
    """The simplest teacher.sharding with which it can be built."""
    fits: bool
    """Whether the teacher fits with it."""
    bytes_per_token: float
    """Bytes of the shards for each token of the examples; the head comes on top."""
    counts: Counts | None
    """The training set; None if the number of its examples is not known."""
    counted: bool
    """Whether the training set was counted; else its examples are as long as they may be."""
    bytes: int | None
    """Bytes of the whole cache; None without `counts`."""
    seconds: float | None
    """Seconds to build it on the machine, without loading the teacher; None without `counts`."""
    seconds_per_step: float
    """The same, spread over the steps of the run; 0 if the cache is there."""
    is_sensible: bool
    """Whether it is there, or its size is known and neither out of proportion to the teacher nor to the disk."""


def count_positions(batch: Batch, times: int = 1) -> Counts:
    """Count the positions in so many batches like one with `label_positions`, on any device."""
    tokens, labels = (times * len(batch.flat_positions(place)) for place in ("tokens", "labels"))
    return {"sequences": times * len(batch.input_ids), "tokens": tokens, "labels": labels}


def trace_cache(
    teacher: PreTrainedModel, method: Method, batch: Batch, settings: CacheConfig, vocabulary: int | None = None
) -> CacheTrace:
    """Trace the teacher's pass over a micro batch of `llmdistill cache`, both on the meta device."""
    tracer, request = Tracer(), Request.of(method)
    tracer.ignore([*teacher.parameters(), *teacher.buffers()])
    teacher.eval().requires_grad_(False)
    tapped_teacher = tap_teacher(method, teacher, vocabulary=vocabulary)
    with on_gpu(), tracer, torch.no_grad():
        outputs = tapped_teacher.compute_targets(batch, lm_head=method.teacher_positions)
        top_k, in_8_bits = settings.stored_top_k, settings.dtype == "int8"
        rows = to_rows(outputs, batch, request, top_k=top_k, vocabulary=vocabulary, in_8_bits=in_8_bits)
    tapped_teacher.remove()
    head = next((inputs for inputs in outputs.lm_head.values() if isinstance(inputs, HeadInputs)), None)
    return CacheTrace(
        settings=settings,
        request=request,
        rows=rows,
        head=None if settings.stored_top_k is not None else head,
        scaling=outputs.taps.scaling,
        micro_batch=count_positions(batch),
        work=tracer.work,
        peak=sum(tracer.take_peak().values()),
    )


def forecast_cache(
    plan: Plan, models: ForecastModels, requested: CacheRequest, sizes: Sizes, machine: MachineConfig
) -> tuple[CacheTrace, CacheForecast]:
    """Trace the contents of a run's cache, and forecast its size and the time to make it on all GPUs of a machine.

    Without a count of the training set, the forecast assumes an example for each row of the run's steps, or of one
    epoch, each as long as it may be. Raises UserError if the number of tokens to keep is not below the vocabulary, or
    an existing cache is damaged.
    """
    folder_of_run, train = plan.config.teacher.cache, plan.config.train
    settings, folder = requested.settings, requested.folder if folder_of_run is None else folder_of_run
    is_there = (Path(folder) / CACHE_FILE).is_file()
    if is_there and folder_of_run is not None:
        # An existing cache has the settings it was made with.
        settings = CacheConfig(**read_cache_record(Path(folder))["settings"])
    check_top_k(settings, plan.models.compared_tokens)
    assert models.teacher is not None
    batch = full_batch(plan, settings.micro_batch_size)
    trace = trace_cache(models.teacher, plan.method, batch, settings, models.vocabulary)
    example, counts = full_batch(plan, plan.task.rows_per_example), requested.counts
    if counts is None and train.epochs is None:
        counts = count_positions(example, train.steps * train.global_batch_size)
    for sharding in shardings(machine):  # the simplest with which the teacher's pass fits, else the last
        layout = Layout(zero=TEACHER_ZERO, sizes=sizes, teacher=sharding, machine=machine)
        needed = layout.reserved({"activations": trace.peak, **layout.resident_teacher})
        fits = sum(needed.values()) <= machine.memory_bytes
        if fits:
            break
    positions = counts or count_positions(
        example, train.global_batch_size
    )  # without a number of steps, those of one step give the rates
    passes = positions["tokens"] / (machine.ranks * trace.micro_batch["tokens"])  # micro batches of each rank
    seconds = passes * layout.pass_seconds(trace.work)
    seconds += read_seconds(
        trace.row_bytes(positions) / machine.ranks, machine
    )  # a disk is written as fast as it is read
    steps = train.steps if train.epochs is None else train.epochs * positions["sequences"] / train.global_batch_size
    size = None if counts is None else trace.shard_bytes(counts) + trace.head_bytes
    largest = min(_MOST_TEACHERS * sizes.teacher_bytes, parse_bytes(machine.cache_space, field="cache_space"))
    return trace, CacheForecast(
        folder=folder,
        settings=settings,
        is_there=is_there,
        sharding=str(layout.teacher),
        fits=fits,
        bytes_per_token=trace.shard_bytes(positions) / max(1, positions["tokens"]),
        counts=counts,
        counted=requested.counts is not None,
        bytes=size,
        seconds=None if counts is None else seconds,
        seconds_per_step=0.0 if is_there else seconds / steps,
        is_sensible=is_there or (size is not None and size <= largest),
    )


def shardings(machine: MachineConfig) -> list[str]:
    """Return the values of teacher.sharding that differ from the simpler ones on a machine."""
    differs = {"node": machine.nodes > 1 and machine.ranks_of_node > 1, "zero3": machine.ranks > 1}
    return [sharding for sharding in SHARDINGS if differs.get(sharding, True)]
