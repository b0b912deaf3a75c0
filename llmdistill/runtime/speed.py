"""How big a model is, by its parts, and how long a forward pass takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.models.families import family_of, layers_of


class ParameterSplit(TypedDict):
    """Parameters by part, each tied one once."""

    embedding: int
    """The token embedding, whole or as the factors that stand for it; a head tied to it is in here."""
    transformer: int
    """The layers."""
    other: int
    """What is left: positions, segments, norms outside the layers, pooler, heads, as far as they are not tied."""
    total: int


@dataclass(frozen=True)
class Timing:
    """Of one forward pass, in seconds."""

    median: float
    iqr: float
    """Distance between the quartiles."""


@dataclass(frozen=True)
class Speed:
    """How fast a model answers."""

    latency: Timing
    """Of one sequence alone."""
    batch: Timing
    """Of a whole batch."""
    throughput: float
    """Sequences a second in whole batches."""
    latency_speedup: float
    """The first model's latency over this one's, by their medians."""
    speedup: float
    """This model's throughput over the first one's: what papers call speed-up."""


def parameter_split(model: PreTrainedModel) -> ParameterSplit:
    """Parameters of the token embedding, of the layers, and of the rest; also on the meta device or under ZeRO-3.

    The first two are the columns Emd and Trm of MiniLM Table 4.

    Raises:
        UserError: the architecture is not supported.
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
    """Time forward passes over random tokens, one sequence alone and whole batches.

    The models take turns, so that noise of a shared machine hits all of them alike. All see the same tokens, where
    they are and in their own number format; each comes back in the mode it was in.

    Args:
        models: by name; the first one is what the others are compared with.
        batch_size: sequences in a whole batch.
        length: tokens in each sequence, without padding.
        repeats: how many passes of each kind are timed.
        warmup: how many go before, not timed.
        seed: of the tokens.

    Raises:
        UserError: a number below 1 (of warmup: below 0), or a length beyond what a model has positions for.
    """
    assert models
    _check_numbers(batch_size=batch_size, length=length, repeats=repeats, warmup=warmup)
    for name, model in models.items():
        _check_length(name, model, length)
    # Token ids that every model has.
    high = min(model.config.vocab_size for model in models.values())
    rng = np.random.default_rng(seed)
    batches = [torch.from_numpy(rng.integers(high, size=(rows, length))) for rows in (1, batch_size)]
    modes = {name: model.training for name, model in models.items()}
    try:
        for model in models.values():
            model.eval()
        seconds = _time_in_turn(models, batches, repeats, warmup)
    finally:
        for name, model in models.items():
            model.train(modes[name])
    return _speeds(seconds, batch_size)


def _speeds(seconds: Mapping[str, list[list[float]]], batch_size: int) -> dict[str, Speed]:
    """From the seconds of each pass with one sequence, and with a whole batch."""
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


def _check_numbers(*, warmup: int, **positive: int) -> None:
    for name, value, least in [("warmup", warmup, 0), *((name, value, 1) for name, value in positive.items())]:
        if value < least:
            raise UserError(f"{name} is {value}: give {least} or more")


def _check_length(name: str, model: PreTrainedModel, length: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None)
    # RoBERTa counts its positions from behind the padding token's.
    for module in model.base_model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            positions = table.num_embeddings - table.padding_idx - 1
    if positions is not None and length > positions:
        raise UserError(f"length is {length}: {name} has positions for {positions} tokens; give {positions} or less")


def _time_in_turn(
    models: Mapping[str, PreTrainedModel], batches: list[Tensor], repeats: int, warmup: int
) -> dict[str, list[list[float]]]:
    """Seconds of each pass, by model and batch."""
    placed = {name: [batch.to(model.device) for batch in batches] for name, model in models.items()}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in batches] for name in models}
    for turn in range(warmup + repeats):
        for kind in range(len(batches)):
            for name, model in models.items():
                passed = _time_forward(model, placed[name][kind])
                if turn >= warmup:
                    seconds[name][kind].append(passed)
    return seconds


@torch.inference_mode()
def _time_forward(model: PreTrainedModel, input_ids: Tensor) -> float:
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if family_of(model.config).causal:
        inputs["use_cache"] = False  # one pass needs none, and keeping it takes time
    _wait(model.device)
    start = time.perf_counter()
    model(**inputs)
    _wait(model.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing(seconds: list[float]) -> Timing:
    low, median, high = np.percentile(seconds, [25, 50, 75])
    return Timing(median=float(median), iqr=float(high - low))
