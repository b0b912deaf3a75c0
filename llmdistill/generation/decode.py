"""Generates a causal LM's answers to prompts in left-padded batches; any number of ranks gives the same answers."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.prompts import answer_ends
from llmdistill.errors import UserError
from llmdistill.generation.kept_answers import Finished, KeptAnswers
from llmdistill.generation.refill import (
    NoRepeatedNgram,
    Refill,
    TokenCount,
    bytes_of_token,
    pad_left,
    rows_by_memory,
)
from llmdistill.generation.response_rows import final_answers
from llmdistill.generation.row_draws import RowDraws, RowSamples
from llmdistill.messages import say
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
    """Prompts answered at once on each rank; on a GPU `rows_by_memory` may choose more."""

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
    """Generates the answers to prompts."""

    def answer(
        self, prompt_ids: Sequence[list[int]], seeds: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the index and the new tokens of each prompt, in any order; at most batch_size at once on a CPU.

        The tokens go up to and including the end token, if the answer has one. seeds has a random state per prompt, so
        that the answers depend on each other only by rounding.
        """


class HuggingFaceEngine:
    """Generates answers with transformers' generate."""

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
        self._model, self._settings, self._synced = model, settings, synced
        pad = tokenizer.pad_token_id
        self._arguments = transformers.GenerationConfig(
            max_new_tokens=settings.max_new_tokens,
            num_beams=1,
            no_repeat_ngram_size=settings.no_repeat_ngram_size,
            eos_token_id=answer_ends(tokenizer, model.generation_config),
            pad_token_id=tokenizer.eos_token_id if pad is None else pad,  # padding is masked, so any token will do
            use_cache=True,
            do_sample=False,  # RowSamples leaves only the token that it drew
        )

    def answer(
        self, prompt_ids: Sequence[list[int]], seeds: Sequence[int], batch_size: int
    ) -> Iterator[tuple[int, list[int]]]:
        """See Engine. The model's mode and its generation settings are restored when the last answer was taken."""
        settings, draws = self._settings, None
        if settings.sample:
            draws = RowSamples(seeds, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
        with inference(self._model, self._arguments):
            yield from new_tokens(
                self._model,
                prompt_ids,
                self._arguments,
                at_once=None if self._synced else batch_size,
                draws=draws,
                count=self.count,
            )


def generate_passes(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[list[int]],
    settings: Decoding,
    *,
    seeds: Sequence[int],
    synced: bool = False,
    kept: KeptAnswers | None = None,
) -> list[GenerationResult]:
    """Generate answers to prompts given as tokens, once with each seed; every rank must call this function.

    The ranks share batches of prompts of similar length, and each prompt has its own random stream from (seed, prompt).
    Therefore one rank and several ranks generate the same texts within rounding, and one pass and several.
    synced: as for `HuggingFaceEngine`, which restores what it changes.
    kept: has the answers of an earlier call that was stopped, and gets each new one; not for a sharded model.
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
    there = Finished({}, 0.0) if kept is None else kept.read(seeds)
    started = time.perf_counter() - there.seconds
    # By pass and index, because the ranks take the batches of all passes in turn.
    answers = {
        (number, index): ids
        for number, seed in enumerate(seeds)
        for (of_seed, index), ids in there.answers.items()
        if of_seed == seed
    }
    if answers:
        said = f"{len(answers)} of {len(seeds) * len(prompt_ids)} answers are there already"
        say(f"{said}; going on.", aside=True)
    engine.count = count = TokenCount((len(seeds) * len(prompt_ids) - len(answers)) * settings.max_new_tokens)
    jobs = [
        ([(job // len(batches), index) for index in batches[job % len(batches)]], is_extra)
        for job, is_extra in shared_jobs(len(seeds) * len(batches), synced=synced)
    ]
    if not synced:
        # Rows of all batches take each other's places. A sharded model needs all ranks in each batch.
        jobs = [([place for places, _ in jobs for place in places if place not in answers], False)]
    with count:
        for places, is_extra in jobs:
            states = [row_seed(seeds[pass_number], index) for pass_number, index in places]
            rows = engine.answer([prompt_ids[index] for _, index in places], states, settings.batch_size)
            for row, ids in rows:
                if is_extra:
                    continue
                number, index = places[row]
                answers[number, index] = ids
                if kept is not None:
                    kept.add(seeds[number], index, ids, time.perf_counter() - started)
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


def row_seed(seed: int, index: int) -> int:
    """Return the random state of a prompt; it fits into 63 bits, because a seed has to fit into int64."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def answer_batches(
    engine: Engine, prompt_ids: Sequence[list[int]], batches: list[list[int]], numbers: Sequence[int], seed: int
) -> Iterator[tuple[int, dict[int, list[int]]]]:
    """Yield some batches as (number, {index of the prompt: token ids}), each when its last answer ends."""
    places = [(number, index) for number in numbers for index in batches[number]]
    done: dict[int, dict[int, list[int]]] = {number: {} for number in numbers}
    states = [row_seed(seed, index) for _, index in places]
    largest = max(map(len, batches))  # only the last batch may be smaller
    for row, ids in engine.answer([prompt_ids[index] for _, index in places], states, largest):
        number, index = places[row]
        done[number][index] = ids
        if len(done[number]) == len(batches[number]):
            yield number, done.pop(number)


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
    at_once: int | None,
    draws: RowDraws | None = None,
    count: TokenCount | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield the index and the new tokens of each prompt, up to and including its end token, if the answer has one.

    arguments: greedy, with the tokens that end an answer as the list `eos_token_id`.
    at_once: rows in a batch; on a GPU `rows_by_memory` may choose more. None: all rows in one batch, in step with the
        other ranks, for a model in shards (ZeRO-3), whose weights all ranks gather together.
    draws: chooses each next token; None takes the most likely one.
    count: counts the tokens while they are generated.
    """
    if not prompt_ids:  # of a rank without a share
        return
    ngram, repeats = arguments.no_repeat_ngram_size, list[transformers.LogitsProcessor]()
    if ngram:
        arguments = copy.deepcopy(arguments)
        arguments.no_repeat_ngram_size, repeats = 0, [NoRepeatedNgram(ngram)]
    size = None if at_once is None else bytes_of_token(model)
    if at_once is not None and size is not None:
        longest = max(map(len, prompt_ids)) + cast(int, arguments.max_new_tokens)
        at_once = max(at_once, rows_by_memory(model, size * longest))
        yield from Refill(model, arguments, repeats, draws, count).answer(prompt_ids, at_once)
        return
    # Padding on the left, so that the new tokens of all rows begin at the same place.
    for batch in plan_batches(prompt_ids, len(prompt_ids) if at_once is None else at_once):
        rows = [prompt_ids[index] for index in batch]
        tokens_BT, mask_BT = pad_left(rows, cast(int, arguments.pad_token_id), model.device)
        if draws is not None:
            draws.expect(batch)
        sequences = model.generate(  # type: ignore[operator]  # a mixin types it as Tensor | Module
            input_ids=tokens_BT,
            attention_mask=mask_BT,
            generation_config=arguments,
            # Ranks whose answers are done go on with the others, which gather weights from them.
            synced_gpus=at_once is None,
            logits_processor=transformers.LogitsProcessorList([*repeats, *([] if draws is None else [draws])]),
            stopping_criteria=transformers.StoppingCriteriaList([] if count is None else [count]),
        )
        for index, row in zip(batch, sequences[:, tokens_BT.shape[1] :].tolist(), strict=True):
            end = next((place for place, token in enumerate(row, start=1) if token in arguments.eos_token_id), len(row))
            yield index, row[:end]
            if count is not None:
                count.skip(cast(int, arguments.max_new_tokens) - len(row))


def gather_answers(answers: dict[Key, list[int]], seconds: float) -> tuple[dict[Key, list[int]], float]:
    """Return the answers of all ranks by their key, and the wall time of the slowest; every rank must call this."""
    parts = gather_objects((answers, seconds))
    return {key: ids for part, _ in parts for key, ids in part.items()}, max(slowest for _, slowest in parts)
