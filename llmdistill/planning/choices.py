"""The settings with which a training can be launched, their memory and time, and the proposal among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, cast

from llmdistill.config.machine import MachineConfig, parse_bytes
from llmdistill.config.teacher import CacheConfig
from llmdistill.errors import UserError
from llmdistill.planning.layout import (
    CACHED,
    PARTS,
    SHARDINGS,
    TEACHER_ZERO,
    TENSOR_PARALLEL,
    Duration,
    Layout,
    Sizes,
    Zero,
    read_seconds,
    shardings,
)
from llmdistill.planning.step import ForecastModels, build_models, full_batch, interpolate, trace_step
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import split_batch
from llmdistill.teachers.cache.folder import CACHE_FILE, read_cache_record
from llmdistill.teachers.cache.making import check_top_k
from llmdistill.teachers.cache.trace import CacheTrace, Counts, count_positions, trace_cache
from llmdistill.teachers.tensor_parallel import CutSizes
from llmdistill.training.checks import can_cache
from llmdistill.training.plan import Plan
from llmdistill.training.rules import find_obstacle

DS_CONFIGS = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""The shipped DeepSpeed configurations, the simplest first."""
_ALIKE = 1.02
"""Times of a step whose ratio is smaller count as equal: the simpler setting is then proposed."""
_MOST_TEACHERS = 100
"""A cache is not proposed if it takes more than so many times the bytes of the teacher."""


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


@dataclass(frozen=True, kw_only=True)
class LayoutChoice(Layout):
    """One way to launch a training."""

    ds_config: str
    """The name of a shipped DeepSpeed configuration, or the path of another."""
    micro_batch_size: int
    checkpointing: bool
    memory: Mapping[str, float]
    """Bytes of each rank, by part."""
    flops: float
    """FLOP of the matrix products of a step on each rank."""
    duration: Duration
    cache: CacheForecast | None = None
    """The cache that is read in place of the teacher's pass; None unless the teacher is "cached"."""

    @cached_property
    def total(self) -> float:
        """The bytes of each rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the memory of a GPU is enough."""
        return self.total <= self.machine.memory_bytes

    @property
    def tight(self) -> bool:
        """Whether less memory than the margin stays free, so that an error of the forecast may matter."""
        return self.total > (1 - self.machine.margin) * self.machine.memory_bytes

    @property
    def seconds(self) -> float:
        """The time of a step with its share of the time to make the cache."""
        return self.duration.seconds + (0.0 if self.cache is None else self.cache.seconds_per_step)

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings of the run, by dotted key."""
        settings: dict[str, Any] = {
            "train.micro_batch_size": self.micro_batch_size,
            "train.activation_checkpointing": self.checkpointing,
        }
        if self.cache is not None:
            settings["teacher.cache"] = self.cache.folder
        elif self.teacher is not None:
            settings["teacher.sharding"] = self.teacher
        return settings

    def describe(self) -> str:
        """Name the choice in a few words."""
        words = [self.ds_config, f"micro batches of {self.micro_batch_size}"]
        words += ["activation checkpointing"] if self.checkpointing else []
        words += [] if self.teacher is None else [f"teacher {self.teacher}"]
        return ", ".join(words)


def make_choices(
    plan: Plan, machine: MachineConfig, names: Sequence[str] = DS_CONFIGS, cache: CacheRequest | None = None
) -> list[LayoutChoice]:
    """Return every way to launch a run on a machine, from the configurations of its models alone.

    `names` are those of shipped DeepSpeed configurations, or paths of others. The `cache` is considered in place of the
    teacher's pass if the run can have one. Ways that the run would refuse are left out. Raises UserError if it would
    refuse them all, the global batch cannot be divided among the ranks, the student's sizes are not known, or the
    settings of the cache are contradictory.
    """
    train, ranks = plan.config.train, machine.ranks
    share = split_batch(train.global_batch_size, None, ranks).micro_batch_size
    # Micro batches of one size, which together are the share of a rank.
    micro_batch_sizes = [size for size in range(1, share + 1) if share % size == 0]
    models = build_models(plan)
    sizes = Sizes.of(models.student, models.teacher)
    # Memory and work grow in proportion to the micro batch, so that two traces, of the ends, give all sizes between.
    ends = [(size, full_batch(plan, size * plan.task.rows_per_example)) for size in (1, share)]
    teachers: list[str | None] = [None]
    cut: CutSizes | None = None
    tokens = ends[0][1].input_ids.numel()
    if models.teacher is not None:
        teachers = [] if plan.is_cached else [*shardings(machine)]
        if (
            plan.config.teacher.sharding == TENSOR_PARALLEL and not plan.is_cached
        ):  # few methods and architectures take it
            cut, teachers = CutSizes.of(models.teacher, machine.ranks_of_node), [TENSOR_PARALLEL]
            sizes = replace(sizes, cut_bytes=cut.cut_bytes)
    cache_trace, forecast = None, None
    request = cache or CacheRequest()
    if can_cache(plan):
        cache_trace, forecast = forecast_cache(plan, models, request, sizes, machine)
        sizes = replace(sizes, cached_head_bytes=cache_trace.head_bytes)
        # A cache can be made only where the teacher fits; one that the run names is used in any case.
        teachers += [CACHED] if forecast.fits or plan.is_cached else []
    ways = list(product(names, (False, True), teachers))
    obstacles = {way: _find_obstacle(plan, *way, folder=request.folder) for way in ways}
    if all(obstacles.values()):
        raise UserError(str(obstacles[ways[0]]))
    traces = {
        (on, cached): [
            replace(
                trace_step(
                    models,
                    batch,
                    checkpointing=on,
                    cached=cache_trace if cached else None,
                    head_ranks=machine.ranks_of_node if not cached and cut is not None and cut.logit_bytes > 0 else 1,
                ),
                micro_batch_size=size,
            )
            for size, batch in ends
        ]
        # The trace of a step does not depend on the DeepSpeed configuration.
        for on in (False, True)
        for cached in sorted({teacher == CACHED for teacher in teachers})
    }
    choices = []
    for name, micro_batch_size in product(names, micro_batch_sizes):
        steps = share // micro_batch_size
        zero = Zero.of(read_ds_config(name), accumulation_steps=steps)
        if not machine.gpus:  # a CPU has no memory for the part of a bucket that is never written
            zero = replace(zero, bucket_size=min(zero.bucket_size, sizes.trained))
        for checkpointing, teacher in product((False, True), teachers):
            if obstacles[name, checkpointing, teacher] is not None:
                continue
            is_cached = teacher == CACHED
            low, high = traces[checkpointing, is_cached]
            trace = interpolate(low, high, micro_batch_size)
            work = trace.student.plus(trace.teacher)
            positions = count_positions(ends[0][1], micro_batch_size)
            read = cache_trace.row_bytes(positions) if is_cached and cache_trace else 0
            compared = sum(positions[place] for place in plan.method.teacher_positions)
            layout = Layout(
                zero=zero,
                sizes=sizes,
                teacher=teacher,
                machine=machine,
                accumulation_steps=steps,
                # The pass of the teacher has the rows of all ranks of the node.
                summed_bytes=0 if cut is None else cut.summed_bytes * tokens * micro_batch_size * machine.ranks_of_node,
                exchanged_bytes=0 if cut is None else cut.logit_bytes * compared,
            )
            choice = LayoutChoice(
                **vars(layout),
                ds_config=name,
                micro_batch_size=micro_batch_size,
                checkpointing=checkpointing,
                memory=layout.peak_memory(trace.moments),
                flops=steps * work.flops,
                duration=layout.step_duration(work, read_bytes=read),
                cache=forecast if is_cached else None,
            )
            choices.append(choice)
    return choices


def _find_obstacle(plan: Plan, name: str, checkpointing: bool, teacher: str | None, *, folder: str) -> str | None:
    """Return why a run would refuse to be launched in a way; None if it would not."""
    config = plan.config
    where = config.teacher
    if teacher == CACHED:
        where = replace(where, cache=where.cache or folder)
    elif teacher is not None:
        where = replace(where, sharding=cast(Any, teacher))
    train = replace(config.train, activation_checkpointing=checkpointing)
    launched = replace(plan, config=replace(config, teacher=where, train=train), ds_config=read_ds_config(name))
    return find_obstacle(launched)


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


def propose(choices: Sequence[LayoutChoice], micro_batch_size: int | None = None) -> LayoutChoice:
    """Return the fastest choice that fits, not tightly if possible; of those that are alike, the simplest.

    The first ds_configs of the choices are the simplest. A `micro_batch_size` that the run sets is used if it fits.
    Raises UserError, which names what is missing, if none fits.
    """
    fitting = _filter_preferred(choices, micro_batch_size)
    if not fitting:
        raise UserError(explain_no_fit(choices))
    fastest = min(choice.seconds for choice in fitting)
    alike = [choice for choice in fitting if choice.seconds <= _ALIKE * fastest]
    simplest = list(dict.fromkeys(choice.ds_config for choice in choices))
    return min(
        alike,
        key=lambda choice: (
            simplest.index(choice.ds_config),
            [None, *SHARDINGS, TENSOR_PARALLEL, CACHED].index(choice.teacher),  # the simplest first
            choice.checkpointing,
            choice.total,
        ),
    )


def _filter_preferred(choices: Sequence[LayoutChoice], micro_batch_size: int | None) -> list[LayoutChoice]:
    """Return the choices that fit; if possible not tightly, without a senseless cache, and with the run's own size."""
    # Each wish below is given up if no choice would be left.
    fitting = [choice for choice in choices if choice.fits]
    fitting = [choice for choice in fitting if choice.cache is None or choice.cache.is_sensible] or fitting
    fitting = [choice for choice in fitting if not choice.tight] or fitting
    return [choice for choice in fitting if micro_batch_size in (None, choice.micro_batch_size)] or fitting


def best_by_kind(choices: Sequence[LayoutChoice], kind: Callable[[LayoutChoice], Any]) -> list[LayoutChoice]:
    """Return one choice of each kind: the fastest that fits, not tightly if possible; else the one that needs least."""

    def order(choice: LayoutChoice) -> tuple[bool, bool, float]:
        return not choice.fits, choice.tight, choice.seconds if choice.fits else choice.total

    kinds = dict.fromkeys(kind(choice) for choice in choices)
    return [min((choice for choice in choices if kind(choice) == value), key=order) for value in kinds]


def explain_no_fit(choices: Sequence[LayoutChoice]) -> str:
    """Explain in one sentence what is missing for the choice that needs least memory."""
    least = min(choices, key=lambda choice: choice.total)
    available = least.machine.memory_bytes
    part = max((name for name in least.memory if PARTS[name][1]), key=lambda name: least.memory[name])
    excess, part_size = (gigabytes(size) for size in (least.total - available, least.memory[part]))
    description, remedy = PARTS[part]
    return (
        f"--gpu_memory: nothing fits in {gigabytes(available)} GB: {least.describe()} needs least, "
        f"{gigabytes(least.total)} GB for each rank, {excess} GB too much, of which {description} are {part_size} GB: "
        f"take {remedy}, or more memory"
    )


def gigabytes(size: float) -> str:
    """Return bytes as a text in GB."""
    return "0" if size == 0 else f"{size / 1e9:.1f}" if size >= 1e9 else f"{size / 1e9:.2g}"


def explain_choice(choice: LayoutChoice, choices: Sequence[LayoutChoice], micro_batch_size: int | None = None) -> str:
    """Explain in one sentence why a choice is proposed."""
    candidates = _filter_preferred(choices, micro_batch_size)
    available = gigabytes(choice.machine.memory_bytes)
    sentence = f"{gigabytes(choice.total)} of {available} GB, {choice.duration.seconds:.3g} s a step; "
    if len(candidates) == 1:
        sentence += "the only setting that fits"
    else:
        sentence += f"the fastest, or the simplest of the fastest, of {len(candidates)} settings that fit"
    if not choice.tight:
        sentence += f" and {'leaves' if len(candidates) == 1 else 'leave'} {choice.machine.margin:.0%} free"
    if choice.micro_batch_size == micro_batch_size:
        sentence += f" with the run's own micro batch size {micro_batch_size}"
    if choice.cache is not None and choice.cache.seconds_per_step > 0:
        sentence += f"; making the cache adds {choice.cache.seconds_per_step:.3g} s for each step"
    if choice.checkpointing:
        keys = ("ds_config", "teacher", "micro_batch_size")
        alike = [other for other in choices if all(getattr(other, key) == getattr(choice, key) for key in keys)]
        # Of the two that differ in checkpointing alone, the one without needs more.
        needed = max(other.total for other in alike)
        sentence += f"; without activation checkpointing it would need {gigabytes(needed)} GB"
    return sentence
