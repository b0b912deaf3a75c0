"""Generates a causal LM's answers to prompts in left-padded batches; any number of ranks gives the same answers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.prompts import answer_ends
from llmdistill.errors import UserError
from llmdistill.generation.response_rows import final_answers
from llmdistill.progress import Activity
from llmdistill.runtime.distributed import World, gather_objects

Key = TypeVar("Key")


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded, as the fields of `ResponseConfig` with these names say."""

    sample: bool
    """True: sample from the model's distribution. False: greedy decoding, which ignores temperature, top_p, top_k."""
    max_prompt_length: int = 256
    max_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    no_repeat_ngram_size: int = 0
    batch_size: int = 32
    """Prompts generated at once on each rank."""

    @property
    def max_new_tokens(self) -> int:
        """The limit of an answer, which depends neither on its batch nor on the length of its prompt."""
        return self.max_length - self.max_prompt_length  # MiniLLM pads every prompt to max_prompt_length


@dataclass(frozen=True)
class GenerationResult:
    """The result of one pass over the prompts, the same on every rank."""

    texts: list[str]
    """The final answers in the order of the prompts; see `final_answers`."""
    tokens: int
    """Number of generated tokens on all ranks, with end tokens, without padding."""
    seconds: float
    """Wall time of the slowest rank; passes that are generated together share it equally."""


class Engine(Protocol):
    """Generates the answers to a batch of prompts."""

    def answer(self, prompt_ids: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """Return the new tokens of each prompt up to and including its end token, if the answer has one.

        seeds has one random state per prompt; an engine with one random stream for the whole batch uses the first.
        """


class TokenCount(Activity, transformers.StoppingCriteria):
    """Shows the generation while a batch runs, which may take minutes: transformers asks it after each token.

    What is left is not known before the answers end, so the bar has the tokens that there are at most.
    """

    def __init__(self, most: int) -> None:
        super().__init__("Answering", most, "tokens at most")
        self._of_batch, self._ranks = 0, World.current().size

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: Any) -> torch.Tensor:
        """Count a token of each row, and stop none."""
        self._of_batch += len(input_ids)
        self._count(len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def end_batch(self, most: int) -> None:
        """Count what the answers of a batch, of at most so many tokens, did not need."""
        self._count(most - self._of_batch)
        self._of_batch = 0

    def _count(self, tokens: int) -> None:
        # Rank 0 alone shows the progress, and the others are about as fast.
        self.advance(min(tokens * self._ranks, cast(int, self.total) - self._done))


class HuggingFaceEngine:
    """Generates answers with transformers' generate, the whole batch at once."""

    count: TokenCount | None = None
    """Counts the tokens while they are generated, where somebody waits for them."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: Decoding,
        *,
        synced: bool = False,
    ) -> None:
        """Decode with a loaded model; synced: the model is sharded (ZeRO-3), so all ranks must call answer together."""
        self._model, self._synced = model, synced
        pad, sampling = tokenizer.pad_token_id, dict[str, Any]()
        if settings.sample:
            sampling = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
        self._arguments = transformers.GenerationConfig(
            max_new_tokens=settings.max_new_tokens,
            num_beams=1,
            no_repeat_ngram_size=settings.no_repeat_ngram_size,
            eos_token_id=answer_ends(tokenizer, model.generation_config),
            pad_token_id=tokenizer.eos_token_id if pad is None else pad,  # padding is masked, so any token will do
            use_cache=True,
            do_sample=settings.sample,
            **sampling,
        )

    def answer(self, prompt_ids: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """See Engine. The global random state, the model's mode and its generation settings are restored."""
        device = self._model.device
        # By default fork_rng saves the states of all GPUs, also those of other ranks.
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with inference(self._model, self._arguments), forked:
            torch.manual_seed(seeds[0])
            return new_tokens(self._model, prompt_ids, self._arguments, synced=self._synced, count=self.count)


def generate_passes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[list[int]],
    settings: Decoding,
    *,
    seeds: Sequence[int],
    synced: bool = False,
) -> list[GenerationResult]:
    """Generate answers to prompts given as tokens, once with each seed; every rank must call this function.

    The prompts are divided into batches before the batches of all passes are distributed over the ranks, and each batch
    has its own random stream from (seed, batch). Therefore one rank and several ranks generate the same texts, and one
    pass and several. synced: as for `HuggingFaceEngine`, which restores what it changes.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    if not model.can_generate():
        raise UserError(f"{model.config.model_type} models do not generate text; give a causal language model")
    check_context(model.config, settings.max_length)
    assert all(0 < len(ids) <= settings.max_prompt_length for ids in prompt_ids)
    # Over all prompts and not each rank's share: what a batch holds must not depend on the number of ranks.
    batches = plan_batches(prompt_ids, settings.batch_size)
    engine = HuggingFaceEngine(model, tokenizer, settings, synced=synced)
    ends = answer_ends(tokenizer, model.generation_config)
    started = time.perf_counter()
    # By pass and index, because the ranks take the batches of all passes in turn.
    answers: dict[tuple[int, int], list[int]] = {}
    engine.count = count = TokenCount(len(seeds) * len(prompt_ids) * settings.max_new_tokens)
    with count:
        for job, is_extra in shared_jobs(len(seeds) * len(batches), synced=synced):
            pass_number, number = divmod(job, len(batches))
            rows = answer_batch(engine, prompt_ids, batches, number, seeds[pass_number])
            count.end_batch(len(rows) * settings.max_new_tokens)
            if not is_extra:
                answers.update({(pass_number, index): row for index, row in rows.items()})
    if model.device.type == "cuda":  # kernels run asynchronously, and the seconds should include all of them
        torch.cuda.synchronize(model.device)
    gathered, seconds = gather_answers(answers, time.perf_counter() - started)
    results = []
    for pass_number in range(len(seeds)):
        rows_in_order = [gathered[pass_number, index] for index in range(len(prompt_ids))]
        texts = final_answers(rows_in_order, tokenizer, ends)
        results.append(GenerationResult(texts, sum(map(len, rows_in_order)), seconds / len(seeds)))
    return results


def shared_jobs(count: int, *, synced: bool) -> Iterator[tuple[int, bool]]:
    """Yield the numbers of this rank's share of some jobs, and whether a job only fills up the last round.

    synced: the jobs need every rank (ZeRO-3), so all ranks get equally many; a rank without a further job repeats the
    last one, and its result does not count.
    """
    world = World.current()
    for first in range(0, count, world.size):
        number = first + world.rank
        if number < count or synced:
            yield min(number, count - 1), number >= count


def plan_batches(prompt_ids: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Divide prompts into batches of similar length, which need little padding; return the prompts' indices per batch.

    The batches depend only on the prompts, so any number of ranks can share them or resume with them.
    """
    order = sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def answer_batch(
    engine: Engine, prompt_ids: Sequence[list[int]], batches: list[list[int]], number: int, seed: int
) -> dict[int, list[int]]:
    """Generate one batch as {index of the prompt: token ids}; its random states depend only on (seed, number)."""
    batch = batches[number]
    # Shifted to 63 bits below, because a seed has to fit into int64.
    states = np.random.SeedSequence((seed, number)).generate_state(len(batch), np.uint64)
    rows = engine.answer([prompt_ids[index] for index in batch], [int(state >> np.uint64(1)) for state in states])
    return dict(zip(batch, rows, strict=True))


def check_context(config: PreTrainedConfig, max_length: int) -> None:
    """Raise a UserError if max_length, the limit of prompt and answer together, exceeds the model's context."""
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and max_length > context:
        raise UserError(f"data.max_length={max_length} is beyond the model's context of {context} tokens; lower it")


@contextmanager
def inference(model: PreTrainedModel, arguments: transformers.GenerationConfig) -> Iterator[None]:
    """Put the model in eval mode with only these generation settings, and restore both afterwards."""
    training = [module for module in model.modules() if module.training]
    # transformers takes settings that an explicit config leaves unset, such as repetition_penalty, from the model's.
    shipped, model.generation_config = model.generation_config, arguments
    model.eval()
    try:
        yield
    finally:
        model.generation_config = shipped
        for module in training:
            module.training = True


def new_tokens(
    model: PreTrainedModel,
    prompt_ids: Sequence[list[int]],
    arguments: transformers.GenerationConfig,
    *,
    synced: bool,
    noise: transformers.LogitsProcessor | None = None,
    count: TokenCount | None = None,
) -> list[list[int]]:
    """Return the new tokens of each prompt up to and including its end token, if the answer has one.

    arguments: with the tokens that end an answer as the list `eos_token_id`.
    noise: is added to the logits of each next token before the largest is taken.
    count: counts the tokens while they are generated.
    """
    width = max(map(len, prompt_ids))
    # Padding on the left, so that the new tokens of all rows begin at the same place.
    input_ids = torch.tensor([[arguments.pad_token_id] * (width - len(ids)) + ids for ids in prompt_ids])
    attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids])
    sequences = model.generate(  # type: ignore[operator]  # a mixin types it as Tensor | Module
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        generation_config=arguments,
        synced_gpus=synced,  # ranks whose answers are done go on with the others, which gather weights from them
        logits_processor=transformers.LogitsProcessorList([] if noise is None else [noise]),
        stopping_criteria=transformers.StoppingCriteriaList([] if count is None else [count]),
    )
    answers = []
    for row in sequences[:, width:].tolist():
        end = next((place for place, token in enumerate(row, start=1) if token in arguments.eos_token_id), len(row))
        answers.append(row[:end])
    return answers


def gather_answers(answers: dict[Key, list[int]], seconds: float) -> tuple[dict[Key, list[int]], float]:
    """Return the answers of all ranks by their key, and the wall time of the slowest; every rank must call this."""
    parts = gather_objects((answers, seconds))
    return {key: ids for part, _ in parts for key, ids in part.items()}, max(slowest for _, slowest in parts)
