"""Forecasts the size and the build time of the cache of a teacher's outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from llmdistill.config.cache import CacheConfig
from llmdistill.config.machine import MachineConfig, parse_bytes
from llmdistill.run.checks import check_top_k
from llmdistill.run.forecast.cached import CacheTrace, PositionCounts, trace_cache
from llmdistill.run.forecast.layout import TEACHER_ZERO, TEACHERS, Layout, Sizes, read_seconds
from llmdistill.run.forecast.step import ForecastModels, full_batch
from llmdistill.run.plan import Plan
from llmdistill.teacher.cache_folder import CACHE_FILE, read_cache_record

_MOST_TEACHERS = 100
"""A cache of more than so many times the bytes of the teacher is not proposed."""


@dataclass(frozen=True, kw_only=True)
class CacheAsked:
    """The cache that a run may read; teacher.cache, if the run sets it, takes precedence."""

    folder: str = "cache"
    settings: CacheConfig = field(default_factory=CacheConfig)
    counts: PositionCounts | None = None
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
    counts: PositionCounts | None
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


def trace_making(plan: Plan, models: ForecastModels, asked: CacheAsked) -> tuple[CacheAsked, CacheTrace]:
    """Trace what a cache of a run keeps; returns also the cache that is meant.

    Raises:
        UserError: the number of tokens to keep is not below the vocabulary, or a cache that is there is damaged.
    """
    named = plan.config.teacher.cache
    settings, folder = asked.settings, asked.folder if named is None else named
    if (Path(folder) / CACHE_FILE).is_file() and named is not None:
        settings = CacheConfig(**read_cache_record(Path(folder))["settings"])
    check_top_k(settings, plan.models.compared_tokens)
    assert models.teacher is not None
    batch = full_batch(plan, settings.micro_batch_size)
    trace = trace_cache(models.teacher, plan.method, batch, settings, models.vocabulary)
    return CacheAsked(folder=folder, settings=settings, counts=asked.counts), trace


def forecast_making(
    plan: Plan, asked: CacheAsked, trace: CacheTrace, sizes: Sizes, machine: MachineConfig
) -> CacheForecast:
    """Forecast the size of a cache, and the time to make it on all GPUs of a machine.

    Without a count of the training set, its examples are those of the run's steps, each seen once, or of one epoch, and
    each is as long as it may be.
    """
    train, counts = plan.config.train, asked.counts
    of_step = PositionCounts.of(full_batch(plan, plan.task.rows_per_example)).times(train.global_batch_size)
    if counts is None and train.epochs is None:
        counts = of_step.times(train.steps)
    layout, fits = _teacher_that_fits(trace, sizes, machine)
    each = counts or of_step  # one step stands for an unknown number of them
    passes = each.tokens / (machine.ranks * trace.micro_batch.tokens)
    seconds = passes * layout.pass_seconds(trace.work)
    seconds += read_seconds(trace.row_bytes(each) / machine.ranks, machine)  # a disk is written as fast as it is read
    steps = train.steps if train.epochs is None else train.epochs * each.sequences / train.global_batch_size
    is_there = (Path(asked.folder) / CACHE_FILE).is_file()
    size = None if counts is None else trace.shard_bytes(counts) + trace.head_bytes
    most = min(_MOST_TEACHERS * sizes.teacher_bytes, parse_bytes(machine.cache_space, field="cache_space"))
    return CacheForecast(
        folder=asked.folder,
        settings=trace.settings,
        is_there=is_there,
        sharding=str(layout.teacher),
        fits=fits,
        bytes_per_token=trace.shard_bytes(each) / max(1, each.tokens),
        counts=counts,
        counted=asked.counts is not None,
        bytes=size,
        seconds=None if counts is None else seconds,
        seconds_per_step=0.0 if is_there else seconds / steps,
        is_sensible=is_there or (size is not None and size <= most),
    )


def _teacher_that_fits(trace: CacheTrace, sizes: Sizes, machine: MachineConfig) -> tuple[Layout, bool]:
    """The layout with the simplest teacher.sharding with which the teacher's pass fits, and whether there is one."""
    for sharding in shardings(machine):
        layout = Layout(zero=TEACHER_ZERO, sizes=sizes, teacher=sharding, machine=machine)
        needed = layout.reserved({"activations": trace.peak, **layout.resident_teacher})
        if sum(needed.values()) <= machine.memory_bytes:
            return layout, True
    return layout, False


def shardings(machine: MachineConfig) -> list[str]:
    """Return the values of teacher.sharding that differ from the simpler ones on a machine."""
    differs = {"node": machine.nodes > 1 and machine.ranks_of_node > 1, "zero3": machine.ranks > 1}
    return [each for each in TEACHERS if differs.get(each, True)]
