"""Answers of a causal LM to prompts: batched, left-padded, the same whatever the number of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import GenerationConfig
from llmdistill.data.instruct import check_lengths, encode_prompts
from llmdistill.errors import UserError


@dataclass(frozen=True)
class GenerationResult:
    """What one pass over the prompts gave, alike on every rank."""

    texts: list[str]
    """In prompt order, cut at the end token, without special tokens, stripped."""
    tokens: int
    """Generated tokens over all ranks, end tokens included, padding not."""
    seconds: float
    """Wall time of the slowest rank."""


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    settings: GenerationConfig,
    *,
    max_prompt_length: int,
    max_length: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    synced: bool = False,
    long_prompts: Literal["error", "truncate"] = "error",
) -> GenerationResult:
    """Answers to prompts given as text; see generate_encoded. A prompt beyond the limit is a UserError or truncated."""
    encoded = encode_prompts(prompts, tokenizer, max_prompt_length=max_prompt_length, long_prompts=long_prompts)
    return generate_encoded(
        model,
        tokenizer,
        encoded.ids,
        settings,
        max_prompt_length=max_prompt_length,
        max_length=max_length,
        seed=seed,
        rank=rank,
        world_size=world_size,
        synced=synced,
    )


def generate_encoded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[list[int]],
    settings: GenerationConfig,
    *,
    max_prompt_length: int,
    max_length: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    synced: bool = False,
) -> GenerationResult:
    """Answers to prompts given as tokens, by MiniLLM's protocol or greedily.

    Every answer has at most max_length - max_prompt_length tokens, so that neither the batch nor the length of
    the prompt decides where it ends (MiniLLM pads every prompt to max_prompt_length). Batches are cut before they
    are shared among the ranks and each has its own random stream from (seed, batch): one rank or several give
    the same texts. synced: the model is sharded (ZeRO-3), so all ranks run the same number of forward passes.
    The global random state, the model's mode and its generation settings are left as they were.
    """
    check_lengths(max_prompt_length, max_length)
    _check_model(model, tokenizer, max_length)
    assert all(0 < len(ids) <= max_prompt_length for ids in prompt_ids)
    order = sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
    batches = [order[start : start + settings.batch_size] for start in range(0, len(order), settings.batch_size)]
    arguments = _arguments(settings, tokenizer, max_length - max_prompt_length)
    started = time.perf_counter()
    answers: dict[int, list[int]] = {}
    with _inference(model, arguments), _own_random_state(model.device):
        # With a sharded model a rank that has run out of batches repeats one, and its answers are forgotten.
        rounds = range(-(-len(batches) // world_size)) if synced else range(len(batches[rank::world_size]))
        for turn in rounds:
            number = turn * world_size + rank
            batch = batches[min(number, len(batches) - 1)]
            _seed(model.device, seed, number)
            rows = _generate_batch(model, [prompt_ids[index] for index in batch], arguments, synced)
            if number < len(batches):
                answers.update(zip(batch, rows, strict=True))
    _synchronize(model.device)
    gathered, seconds = _gather(answers, time.perf_counter() - started, world_size)
    rows = [gathered[index] for index in range(len(prompt_ids))]
    # The end token is cut here: a tokenizer need not count it among its special tokens.
    ended = [row[:-1] if row[-1] == tokenizer.eos_token_id else row for row in rows]
    texts = tokenizer.batch_decode(ended, skip_special_tokens=True)
    return GenerationResult([text.strip() for text in texts], sum(map(len, rows)), seconds)


def _check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    if not model.can_generate():
        raise UserError(f"{model.config.model_type} models do not generate text; give a causal language model")
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and max_length > context:
        raise UserError(f"data.max_length={max_length} is beyond the model's context of {context} tokens; lower it")


def _arguments(
    settings: GenerationConfig, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int
) -> transformers.GenerationConfig:
    pad = tokenizer.pad_token_id
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.decoding == "sample":
        sampling = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    return transformers.GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=1,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
        use_cache=True,
        **sampling,
    )


@contextmanager
def _inference(model: PreTrainedModel, arguments: transformers.GenerationConfig) -> Iterator[None]:
    """Eval mode, and no generation settings but ours."""
    training = [module for module in model.modules() if module.training]
    # transformers fills whatever an explicit config leaves open from the model's own (a repetition penalty, say).
    shipped, model.generation_config = model.generation_config, arguments
    model.eval()
    try:
        yield
    finally:
        model.generation_config = shipped
        for module in training:
            module.training = True


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _seed(device: torch.device, seed: int, batch: int) -> None:
    state = int(np.random.SeedSequence((seed, batch)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    torch.random.default_generator.manual_seed(state)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(state)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _generate_batch(
    model: PreTrainedModel, prompt_ids: list[list[int]], arguments: transformers.GenerationConfig, synced: bool
) -> list[list[int]]:
    """New tokens of each prompt up to its end token, that one included where it came."""
    input_ids, attention_mask = _left_pad(prompt_ids, arguments.pad_token_id)
    sequences = model.generate(  # type: ignore[operator]  # a mixin types it as Tensor | Module
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        generation_config=arguments,
        synced_gpus=synced,
    )
    answers = []
    for row in sequences[:, input_ids.shape[1] :].tolist():
        end = row.index(arguments.eos_token_id) + 1 if arguments.eos_token_id in row else len(row)
        answers.append(row[:end])
    return answers


def _left_pad(prompt_ids: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompt_ids))
    input_ids = torch.tensor([[pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    return input_ids, attention_mask


def _gather(answers: dict[int, list[int]], seconds: float, world_size: int) -> tuple[dict[int, list[int]], float]:
    if world_size == 1:
        return answers, seconds
    parts: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(parts, (answers, seconds))
    return {index: ids for part, _ in parts for index, ids in part.items()}, max(slowest for _, slowest in parts)
