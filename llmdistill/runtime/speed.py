"""The number of parameters of a model by part, the time of a forward pass, and what this CPU reaches."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils.benchmark import Timer, timer
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.models.families import is_causal, layers_of, max_positions
from llmdistill.progress import progress

Inputs = Mapping[str, Any]
"""The keyword arguments of a model's forward pass."""


def parameter_split(model: PreTrainedModel) -> dict[str, int]:
    """Count the parameters by part: embedding, transformer (these are Emd and Trm of MiniLM Table 4), other and total.

    The embedding includes a head that is tied to it. Works on the meta device and with ZeRO-3.

    Raises UserError if the architecture is not supported.
    """
    embedding = list(model.get_input_embeddings().parameters())
    transformer = list(layers_of(model).parameters())
    counted = {id(parameter) for parameter in (*embedding, *transformer)}
    other = [parameter for parameter in model.parameters() if id(parameter) not in counted]
    sizes = _count(embedding), _count(transformer), _count(other)
    return {"embedding": sizes[0], "transformer": sizes[1], "other": sizes[2], "total": sum(sizes)}


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)


def measure_speed(
    models: Mapping[str, PreTrainedModel],
    *,
    batch_size: int = 32,
    length: int = 128,
    repeats: int = 20,
    warmup: int = 3,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Time forward passes over random tokens, for a single sequence and for whole batches.

    All models get the same tokens, of a seed, one after the other; see `time_batches`. A sequence has `length` tokens,
    without padding. `repeats` passes of each kind are timed, after `warmup` others.

    Returns:
        For each model the `timing` in seconds of a single sequence, ``latency``, and of a whole batch, ``batch``; the
        ``throughput``, sequences per second in whole batches; and ``latency_speedup`` and ``speedup`` over the first
        model, by the medians of both. Papers call the latter speed-up.

    Raises UserError if the length exceeds the number of positions of a model.
    """
    assert models
    assert min(batch_size, length, repeats) >= 1
    for name, model in models.items():
        check_length(name, model.config, length)
    # Use only token ids that every model has.
    high = min(model.config.vocab_size for model in models.values())
    rng = np.random.default_rng(seed)
    tokens = [torch.from_numpy(rng.integers(high, size=(rows, length))) for rows in (1, batch_size)]
    batches: list[Inputs] = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]
    # Single sequences and whole batches take turns, so that noise reaches both.
    seconds_by_model = time_batches(
        models, dict.fromkeys(models, batches * (warmup + repeats)), warmup=len(batches) * warmup
    )
    seconds = {name: (both[0::2], both[1::2]) for name, both in seconds_by_model.items()}
    timings = {name: (timing(alone), timing(whole)) for name, (alone, whole) in seconds.items()}
    base = next(iter(timings.values()))
    return {
        name: {
            "latency": alone,
            "batch": whole,
            "throughput": batch_size / whole["median"],
            "latency_speedup": base[0]["median"] / alone["median"],
            "speedup": base[1]["median"] / whole["median"],
        }
        for name, (alone, whole) in timings.items()
    }


def time_batches(
    models: Mapping[str, PreTrainedModel],
    batches: Mapping[str, Sequence[Inputs]],
    *,
    warmup: int,
    training: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds that each model takes for each of its batches.

    For each batch the models are timed one after the other, so that noise on a shared machine affects all of them
    equally. They run on their own device and in their own dtype; the training mode of each model is restored.

    Args:
        models: the models by name.
        batches: equally many of each model; each is on the model's device before the clock starts.
        warmup: the number of first batches whose times are left out.
        training: time a training step instead of a forward pass: forward pass, backward pass and an update by AdamW,
            where the loss is the mean square of the model's output. This changes the weights.
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    works: dict[str, Callable[[Inputs], None]] = {
        name: partial(_step, model, torch.optim.AdamW(model.parameters(), lr=1e-5))
        if training
        else partial(_forward, model)
        for name, model in models.items()
    }
    modes = {name: model.training for name, model in models.items()}
    try:
        for model in models.values():
            model.train(training)
        for number in progress(range(len(next(iter(batches.values())))), "Timing", "batches"):
            for name, model in models.items():
                inputs = {key: value.to(model.device) for key, value in batches[name][number].items()}
                if is_causal(model.config):
                    inputs["use_cache"] = False  # a single pass needs no cache, and writing a cache takes time
                passed = timed(partial(works[name], inputs))
                if number >= warmup:
                    seconds[name].append(passed)
    finally:
        for name, model in models.items():
            model.train(modes[name])
    return seconds


def _step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    model(**inputs)[0].float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def _forward(model: PreTrainedModel, inputs: Inputs) -> None:
    model(**inputs)


def check_length(name: str, config: PreTrainedConfig, length: int) -> None:
    """Raise a UserError if a model does not have positions for so many tokens."""
    positions = max_positions(config, length)
    if length > positions:
        raise UserError(f"length is {length}: {name} has positions for {positions} tokens; give {positions} or less")


def timed(work: Callable[[], None]) -> float:
    """Return the seconds of a call; a GPU is waited for before and after."""
    start = timer()
    work()
    return timer() - start


def timing(seconds: Sequence[float]) -> dict[str, float]:
    """Return the `median` and the interquartile range, `iqr`, of times."""
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return {"median": float(median), "iqr": float(high - low)}


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
        "tflops": 2e-12 * side**3 / seconds("left @ right"),  # a product of n x n matrices takes 2 n³ FLOP
        "memory_bandwidth": 1e-9 * 2 * numbers.nbytes / seconds("target.copy_(numbers)"),  # GB/s, read and written
        "cache_space": f"{shutil.disk_usage('.').free / 1e9:.1f}GB",
        "reserved": "1GB",  # Python with torch, transformers and DeepSpeed
    }
