"""The number of parameters of a model by part, and the time of a forward pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.models.families import family_of, layers_of


@dataclass(frozen=True)
class Timing:
    """The time of one forward pass, in seconds."""

    median: float
    iqr: float
    """The interquartile range."""


@dataclass(frozen=True)
class Speed:
    """The speed of a model's forward pass."""

    latency: Timing
    """The time for a single sequence."""
    batch: Timing
    """The time for a whole batch."""
    throughput: float
    """Sequences per second in whole batches."""
    latency_speedup: float
    """The median latency of the first model divided by the median latency of this model."""
    speedup: float
    """The throughput of this model divided by that of the first model; papers call this speed-up."""


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
) -> dict[str, Speed]:
    """Time forward passes over random tokens, for a single sequence and for whole batches.

    The models are timed in turns, so that noise on a shared machine affects all of them equally. All models get the
    same tokens and run on their own device and in their own dtype; the training mode of each model is restored.

    Args:
        models: the models by name; the others are compared with the first one.
        batch_size: sequences in a whole batch.
        length: tokens in each sequence, without padding.
        repeats: the number of timed passes of each kind.
        warmup: the number of passes before them that are not timed.
        seed: the seed of the tokens.

    Raises UserError if the length exceeds the number of positions of a model.
    """
    assert models
    assert min(batch_size, length, repeats) >= 1
    for name, model in models.items():
        _check_length(name, model, length)
    # Use only token ids that every model has.
    high = min(model.config.vocab_size for model in models.values())
    rng = np.random.default_rng(seed)
    batches = [torch.from_numpy(rng.integers(high, size=(rows, length))) for rows in (1, batch_size)]
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in models}
    modes = {name: model.training for name, model in models.items()}
    try:
        for model in models.values():
            model.eval()
        for turn in range(warmup + repeats):
            for kind, batch in enumerate(batches):
                for name, model in models.items():
                    passed = _time_forward(model, batch.to(model.device))
                    if turn >= warmup:
                        seconds[name][kind].append(passed)
    finally:
        for name, model in models.items():
            model.train(modes[name])
    timings = {name: (_timing(alone), _timing(whole)) for name, (alone, whole) in seconds.items()}
    base = next(iter(timings.values()))
    return {
        name: Speed(
            latency=alone,
            batch=whole,
            throughput=batch_size / whole.median,
            latency_speedup=base[0].median / alone.median,
            speedup=base[1].median / whole.median,
        )
        for name, (alone, whole) in timings.items()
    }


def _check_length(name: str, model: PreTrainedModel, length: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    # RoBERTa numbers its positions from the padding token id + 1.
    for module in model.base_model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            positions = table.num_embeddings - table.padding_idx - 1
    if positions is not None and length > positions:
        raise UserError(f"length is {length}: {name} has positions for {positions} tokens; give {positions} or less")


@torch.inference_mode()
def _time_forward(model: PreTrainedModel, input_ids: Tensor) -> float:
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if family_of(model.config).causal:
        inputs["use_cache"] = False  # a single pass needs no cache, and writing a cache takes time
    _wait(model.device)
    start = time.perf_counter()
    model(**inputs)
    _wait(model.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(seconds: list[float]) -> Timing:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return Timing(median=float(median), iqr=float(high - low))
