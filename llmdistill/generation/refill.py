"""Answers by transformers' generate, in which rows that are done make room for waiting ones.

A plain batch runs until its longest answer ends, with all rows. Here each call of generate ends when a share of its
rows has ended; these leave the batch with their keys and values, prompts that wait take their places, and the next call
goes on from the same cache. Each row still computes what it would compute alone.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from llmdistill.generation.row_draws import RowDraws
from llmdistill.models.general import cache_argument
from llmdistill.progress import Activity
from llmdistill.runtime.distributed import World

_SHARE = 0.25
"""Share of the rows whose end ends a call. A smaller one wastes less on rows that are done, and copies caches more."""
_PROMPT_TOKENS = 16_384
"""Largest number of tokens, with padding, of the prompts that are read at once."""
_MOST_ROWS = 512
"""Largest number of rows at once that is chosen by memory: more make a step slower by as much."""


class TokenCount(Activity, transformers.StoppingCriteria):
    """Shows the generation while a batch runs, which may take minutes: transformers asks it after each token.

    What is left is not known before the answers end, so the bar has the tokens that there are at most.
    """

    def __init__(self, most: int) -> None:
        super().__init__("Answering", most, "tokens at most")
        self._ranks = World.current().size

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: Any) -> torch.Tensor:
        """Count a token of each row, and stop none."""
        self._count(len(input_ids))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def skip(self, tokens: int) -> None:
        """Count tokens that an answer could have had and did not need."""
        self._count(tokens)

    def _count(self, tokens: int) -> None:
        # Rank 0 alone shows the progress, and the others are about as fast.
        self.advance(min(tokens * self._ranks, cast(int, self.total) - self._done))


class NoRepeatedNgram(transformers.LogitsProcessor):
    """Bans the tokens that would repeat an n-gram, as transformers' processor does row by row in Python."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits of the next token, (B, V), with -inf at those tokens."""
        before = self._size - 1
        windows = input_ids.shape[1] - before
        if windows < 1:
            return scores
        # Whether the n - 1 tokens from each place on are the last ones; the token after them is banned.
        same_BT = torch.ones(len(input_ids), windows, dtype=torch.bool, device=input_ids.device)
        for place in range(before):
            same_BT &= input_ids[:, place : place + windows] == input_ids[:, windows + place, None]
        counts_BV = torch.zeros_like(scores).scatter_add_(1, input_ids[:, before:], same_BT.to(scores.dtype))
        return scores.masked_fill(counts_BV > 0, -torch.inf)


class _EnoughEnded(transformers.StoppingCriteria):
    """Ends a call of generate when so many of its rows have ended."""

    def __init__(self, ends: Tensor, enough: int) -> None:
        self._ends, self._enough = ends, enough
        self._ended_B: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: object, **_: Any) -> Tensor:
        ends_B = torch.isin(input_ids[:, -1], self._ends)
        self._ended_B = ends_B if self._ended_B is None else self._ended_B | ends_B
        return (self._ended_B.sum() >= self._enough).expand(len(input_ids))


class Refill:
    """The rows that are being answered: their tokens and mask, (B, T), and their keys and values of T - 1 tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: transformers.GenerationConfig,
        processors: Sequence[transformers.LogitsProcessor] = (),
        draws: RowDraws | None = None,
        count: TokenCount | None = None,
    ) -> None:
        """The arguments are as for `decode.new_tokens`."""
        name = cache_argument(model)
        assert name is not None
        assert not arguments.do_sample
        self._model, self._arguments, self._cache_name = model, arguments, name
        self._draws, self._count = draws, count
        self._processors = [*processors, *([] if draws is None else [draws])]
        self._ends = torch.tensor(arguments.eos_token_id, device=model.device)
        self._rows: list[int] = []
        self._written: dict[int, list[int]] = {}
        self._tokens_BT = self._mask_BT = torch.empty(0, 0, dtype=torch.long, device=model.device)
        self._cache = DynamicCache()

    def answer(self, prompt_ids: Sequence[list[int]], at_once: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the index and the new tokens of each prompt when its answer ends; at most at_once rows at a time.

        The new tokens go up to and including the end token, if the answer has one.
        """
        # Prompts of similar length need little padding, and a row that joins a batch is about as long as its rows are.
        waiting = deque(sorted(range(len(prompt_ids)), key=lambda index: len(prompt_ids[index])))
        while waiting or self._rows:
            if waiting and len(self._rows) < at_once:
                width, joining = 0, list[int]()
                while waiting and len(self._rows) + len(joining) < at_once:
                    width = max(width, len(prompt_ids[waiting[0]]))
                    if joining and width * (len(joining) + 1) > _PROMPT_TOKENS:
                        break
                    joining.append(waiting.popleft())
                yield from self._join(joining, [prompt_ids[row] for row in joining])
            else:
                # Until a share of the rows has ended, or the first one has reached its limit: no row writes beyond it,
                # where a model may have no positions.
                limit = cast(int, self._arguments.max_new_tokens)
                steps = limit - max(len(self._written[row]) for row in self._rows)
                yield from self._generate(steps, math.ceil(_SHARE * len(self._rows)))

    def _join(self, rows: list[int], prompts: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
        """Read prompts, write the first token of their answers, and add them to the rows."""
        tokens_BT, mask_BT = pad_left(prompts, cast(int, self._arguments.pad_token_id), self._model.device)
        others = self._rows, self._tokens_BT, self._mask_BT, self._cache
        self._rows, self._tokens_BT, self._mask_BT, self._cache = rows, tokens_BT, mask_BT, DynamicCache()
        self._written.update((row, []) for row in rows)
        yield from self._generate(1, len(rows))
        if not others[0]:
            return
        if not self._rows:
            self._rows, self._tokens_BT, self._mask_BT, self._cache = others
            return
        widest = max(self._tokens_BT.shape[1], others[1].shape[1])

        def together(first: Tensor, second: Tensor) -> Tensor:
            parts = [functional.pad(part, (widest - part.shape[1], 0)) for part in (first, second)]
            return torch.cat(parts)

        self._rows = others[0] + self._rows
        self._tokens_BT = together(others[1], self._tokens_BT)
        self._mask_BT = together(others[2], self._mask_BT)
        for old, new in zip(_layers(others[3]), _layers(self._cache), strict=True):
            for name in ("keys", "values"):
                parts = [getattr(layer, name) for layer in (old, new)]
                parts = [functional.pad(part, (0, 0, widest - 1 - part.shape[-2], 0)) for part in parts]
                setattr(new, name, torch.cat(parts))
            old.reset()

    def _generate(self, steps: int, enough: int) -> Iterator[tuple[int, list[int]]]:
        """Write so many tokens, or fewer if enough rows end; yield the rows that are done, and let them leave."""
        if self._draws is not None:
            self._draws.expect(self._rows)
        before, arguments = self._tokens_BT.shape[1], copy.deepcopy(self._arguments)
        arguments.max_new_tokens = steps
        criteria = [_EnoughEnded(self._ends, enough), *([] if self._count is None else [self._count])]
        self._tokens_BT = self._model.generate(  # type: ignore[operator]  # a mixin types it as Tensor | Module
            input_ids=self._tokens_BT,
            attention_mask=self._mask_BT,
            generation_config=arguments,
            logits_processor=transformers.LogitsProcessorList(self._processors),
            stopping_criteria=transformers.StoppingCriteriaList(criteria),
            **{self._cache_name: self._cache},
        )
        new = self._tokens_BT[:, before:].tolist()
        ends, limit = set(cast(list[int], self._arguments.eos_token_id)), cast(int, self._arguments.max_new_tokens)
        self._mask_BT = functional.pad(self._mask_BT, (0, len(new[0])), value=1)
        staying = []
        for place, (row, tokens) in enumerate(zip(self._rows, new, strict=True)):
            end = next((number for number, token in enumerate(tokens, start=1) if token in ends), None)
            written = self._written[row]
            calculated = len(written) + len(tokens)
            written += tokens[:end]
            if end is not None or len(written) == limit:
                if self._count is not None:
                    self._count.skip(limit - calculated)
                yield row, self._written.pop(row)
            else:
                staying.append(place)
        if len(staying) == len(self._rows):
            return
        self._rows = [self._rows[place] for place in staying]
        if not staying:
            self._cache = DynamicCache()
            return
        places = torch.tensor(staying).to(self._model.device, non_blocking=True)
        self._mask_BT = self._mask_BT[places]
        # Columns that only rows had that have left.
        first = int(self._mask_BT.any(0).int().argmax())
        self._tokens_BT, self._mask_BT = self._tokens_BT[places, first:], self._mask_BT[:, first:]
        self._cache.batch_select_indices(places)
        for layer in _layers(self._cache) if first else ():
            layer.keys, layer.values = layer.keys[..., first:, :], layer.values[..., first:, :]


def pad_left(rows: Sequence[list[int]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of tokens and their mask, both (B, T), with padding on the left."""
    width = max(map(len, rows))
    tokens_BT = torch.tensor([[padding] * (width - len(ids)) + ids for ids in rows])
    mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in rows])
    return tokens_BT.to(device, non_blocking=True), mask_BT.to(device, non_blocking=True)


def _layers(cache: DynamicCache) -> list[Any]:
    """Return the layers that hold keys and values; others share theirs."""
    return [layer for layer in cast(Any, cache).layers if layer.is_initialized]


@torch.no_grad()
def bytes_of_token(model: PreTrainedModel) -> int | None:
    """Return the bytes of a token's keys and values; None if the model keeps other states, and rows stay together."""
    name = cache_argument(model)
    if name is None:
        return None
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = getattr(model(input_ids=token, use_cache=True), name, None)
    if type(cache) is not DynamicCache:
        return None
    if any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return None
    tensors = [tensor for layer in _layers(cache) for tensor in (layer.keys, layer.values)]
    return sum(int(tensor.nbytes) for tensor in tensors)


def rows_by_memory(model: PreTrainedModel, cache_bytes: int) -> int:
    """Return how many rows half of the free memory of the model's GPU holds, a power of two up to 512; 1 on a CPU.

    cache_bytes: of the keys and values of a row.
    """
    if model.device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    # Logits in fp32, the sums of their probabilities in fp64, and what is between them.
    return fitting_rows(free // 2, cache_bytes + 6 * 4 * model.config.get_text_config().vocab_size)


def fitting_rows(free: int, row_bytes: int) -> int:
    """Return the power of two of rows that fit into free bytes, from 1 to 512."""
    # A power of two, so that a run whose free memory is a little other has the same batches.
    return 2 ** min(_MOST_ROWS, max(1, free // row_bytes)).bit_length() // 2
