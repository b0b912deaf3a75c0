"""Small models with random weights under a real DeepSpeed engine, or without one, and what a step of them needs.

gpu_check trains them for a few steps; the test of the forecast measures them on gloo ranks.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import benching
import torch
from plain_engine import PlainEngine
from step_rows import ds_config, low_rank, trainer_of
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig, TrainConfig
from llmdistill.config.machine import MachineConfig
from llmdistill.config.teacher import CacheConfig
from llmdistill.methods import Method, build_method
from llmdistill.models.families import is_causal
from llmdistill.models.load import build_meta, build_random
from llmdistill.planning.layout import CACHED, Layout, Sizes, Zero
from llmdistill.planning.step import ForecastModels, trace_step
from llmdistill.runtime.devices import TORCH_DTYPES
from llmdistill.runtime.distributed import World, largest_number
from llmdistill.runtime.engine import add_projectors, build_engine, set_training
from llmdistill.step.forward import TappedModel
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.cache.trace import trace_cache

TaughtBy = Callable[[TappedModel, Method], Teacher]
"""Puts something in the place of the live teacher."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A teacher, a student of the same shape, and how the student is trained."""

    config: PreTrainedConfig = field(default_factory=lambda: llama())
    method: str = "makd"
    factorized: bool = True
    stage: int | None = 2
    """The ZeRO stage; None trains without DeepSpeed, by torch's AdamW."""
    micro_batch_size: int = 4
    length: int = 128
    checkpointing: bool = False
    dtype: str = "fp32"
    accumulation_steps: int = 1
    bucket: int = 100_000
    """Elements of a bucket of the communication; few, so that the buckets are not all of the memory."""


def llama(
    *, vocabulary: int = 512, width: int = 128, depth: int = 4, heads: int = 4, weight_std: float = 0.02
) -> LlamaConfig:
    """Of few words, as the LM head takes more rows at once on a GPU than on a CPU, and half as many key heads."""
    sizes = {"num_hidden_layers": depth, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
    sizes |= {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width}
    return LlamaConfig(**sizes, initializer_range=weight_std)


def models_of(setting: Setting, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The teacher and the student of a setting, with different weights; without any on the meta device."""
    config, on_meta = setting.config, device.type == "meta"
    made = [build_meta(config, "lm_head") if on_meta else build_random(config, "lm_head", seed=seed) for seed in (0, 1)]
    if setting.factorized:
        low_rank(made[1], FactorizeConfig(target_params="70%"))
    teacher, student = (each.to(device, TORCH_DTYPES[setting.dtype]) for each in made)  # type: ignore[arg-type]
    return teacher.eval().requires_grad_(False), student


def batch_of(setting: Setting) -> Batch:
    """A batch without padding, the same on every rank."""
    shape = (setting.micro_batch_size, setting.length)
    ids = torch.randint(5, setting.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    if not is_causal(setting.config):
        labels[:, setting.length // 4 :] = -100
    samples = tuple((row,) for row in range(setting.micro_batch_size))
    return Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels, sample_ids=samples)


def ds_config_of(setting: Setting, world_size: int) -> tuple[dict[str, Any], TrainConfig]:
    """The DeepSpeed configuration of a setting, made from the shipped one, and the settings of its training."""
    size = setting.micro_batch_size * world_size * setting.accumulation_steps
    train = TrainConfig(
        global_batch_size=size,
        micro_batch_size=setting.micro_batch_size,
        activation_checkpointing=setting.checkpointing,
        dtype=setting.dtype,  # type: ignore[arg-type]
    )
    zero = {f"{each}_bucket_size": setting.bucket for each in ("reduce", "allgather")}
    if setting.stage == 3:  # otherwise every matrix of these models would be small enough to stay whole
        zero["stage3_param_persistence_threshold"] = 0
    return ds_config(f"zero{setting.stage}", train, world_size, **zero), train


def make_trainer(setting: Setting, taught_by: TaughtBy = lambda live, _: live) -> Any:
    """The trainer of a setting, as a run has it; its steps are given their batches."""
    config, world = setting.config, World.current()
    teacher, student = models_of(setting, world.device)
    method = build_method([setting.method], {}, config, config)
    projectors = add_projectors(student, method.projections, seed=0)
    engine: Any
    if setting.stage is None:
        train = TrainConfig()
        set_training(student, checkpointing=setting.checkpointing)
        rate = train.peak_learning_rate
        adamw = torch.optim.AdamW(student.parameters(), rate, train.betas, train.eps, weight_decay=0.0)
        engine = PlainEngine(student, adamw, max_grad_norm=train.max_grad_norm)
    else:
        deepspeed, train = ds_config_of(setting, world.size)
        engine = build_engine(student, deepspeed, train)
    targets_from = taught_by(tap_teacher(method, teacher), method)
    tapped_student = tap_student(method, engine.module, forward=engine, projectors=projectors)
    return trainer_of(engine, tapped_student, targets_from, method, train)


def measure(setting: Setting, taught_by: TaughtBy = lambda live, _: live) -> dict[str, float]:
    """The bytes of all tensors between two steps, and the most that the allocator gave out in a step above them."""
    world = World.current()
    before = allocated(world.device)
    trainer = make_trainer(setting, taught_by)
    batches = [batch_of(setting)] * setting.accumulation_steps
    trainer.train_step(batches)  # the first step makes the optimizer's state
    resident = allocated(world.device) - before
    return {"resident": resident, "peak": peak(lambda: trainer.train_step(batches), world.device)}


def allocated(device: torch.device) -> int:
    """The bytes that torch's allocator on a GPU has given out, or those of the storages of all tensors on the CPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors if each.device.type == "cpu"]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def peak(work: Callable[[], object], device: torch.device) -> float:
    """The most bytes that were allocated at the same time during the work, above those before it."""
    if device.type == "cuda":
        return benching.peak(work, device)
    peaks: list[int] = []
    # The least of them, as gloo's threads let go of their buffers some time after the exchange; twice the same on every
    # rank is it. All ranks do the same work as often.
    while len(peaks) < 5 and largest_number(int(peaks.count(min(peaks, default=0)) < 2)):
        with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiler:
            work()
        events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
        sizes = (each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
        peaks.append(max(accumulate(sizes, initial=0)))
    return min(peaks)


def forecast(setting: Setting, ranks: int, content: Any = None) -> dict[str, float]:
    """The same memory by part, from shapes alone, as `llmdistill plan` forecasts it; with `content` from a cache."""
    config = setting.config
    teacher, student = models_of(setting, torch.device("meta"))
    method = build_method([setting.method], {}, config, config)
    with torch.device("meta"):
        projectors = add_projectors(student, method.projections, seed=0)
    models = ForecastModels(student=student, projectors=projectors, teacher=teacher, method=method)
    batch = batch_of(setting).with_positions(shift=method.shift).to("meta")
    cached = None if content is None else trace_cache(teacher, method, batch, CacheConfig(content=content))
    trace = trace_step(models, batch, checkpointing=setting.checkpointing, cached=cached)
    layout = Layout(
        zero=Zero.of(ds_config_of(setting, ranks)[0], accumulation_steps=setting.accumulation_steps),
        sizes=Sizes.of(student, teacher, cached_head_bytes=0 if cached is None else cached.head_bytes),
        teacher="replicated" if cached is None else CACHED,
        machine=MachineConfig(gpus=ranks),
        accumulation_steps=setting.accumulation_steps,
    )
    parts = layout.peak_memory(trace.moments)
    return {name: size for name, size in parts.items() if name != "allocator"}
