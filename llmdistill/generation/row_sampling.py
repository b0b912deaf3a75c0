"""Samples of a causal LM in which each row has random numbers of its own, so that no row depends on its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.generation.decode import Decoding, inference, new_tokens
from llmdistill.generation.row_draws import RowSamples
from llmdistill.generation.vllm_engine import VllmEngine


class Sample(NamedTuple):
    """What a model has written after a prompt."""

    ids: list[int]
    """Its tokens, with the end token if it has one."""
    nats: float
    """The sum of their negative log-probabilities at temperature 1."""


class RowSampler(Protocol):
    """Samples a row after each prompt."""

    def sample(
        self, prompt_ids: list[list[int]], seeds: list[int], decoding: Decoding, ends: Sequence[int]
    ) -> list[Sample]:
        """Return the samples of prompts, each with its seed; `ends` are the tokens that end them."""
        ...


@dataclass(frozen=True)
class HuggingFaceRows:
    """A loaded model, by transformers' generate."""

    model: PreTrainedModel
    pad_token_id: int
    written: Callable[[int], None]
    """Is told how many tokens were written, after each of all rows."""

    @torch.no_grad()
    def sample(
        self, prompt_ids: list[list[int]], seeds: list[int], decoding: Decoding, ends: Sequence[int]
    ) -> list[Sample]:
        """See RowSampler."""
        arguments = transformers.GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=False,  # RowSamples leaves only the token that it drew
            eos_token_id=list(ends),
            pad_token_id=self.pad_token_id,
        )
        sampling = _Sampling(seeds, self.model.device, decoding, list(ends), self.written)
        # On a GPU by its memory.
        at_once = len(prompt_ids) if self.model.device.type == "cpu" else 1
        with inference(self.model, arguments):
            answers = dict(new_tokens(self.model, prompt_ids, arguments, at_once=at_once, draws=sampling))
        return [Sample(answers[row], nats) for row, nats in enumerate(sampling.nats_B.tolist())]


class _Sampling(RowSamples):
    """Samples at a temperature and top-p, and adds up the samples' log-probabilities."""

    def __init__(
        self,
        seeds: Sequence[int],
        device: torch.device,
        decoding: Decoding,
        ends: list[int],
        written: Callable[[int], None],
    ) -> None:
        super().__init__(seeds, temperature=decoding.temperature, top_p=decoding.top_p)
        self._written, self._ends = written, torch.tensor(ends, device=device)
        self._going_B = torch.ones(len(seeds), dtype=torch.bool, device=device)
        self.nats_B = torch.zeros(len(seeds), device=device)
        """Of all rows, also those that are not in the batch."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See RowDraws."""
        rows_B = torch.tensor(self._rows).to(scores.device, non_blocking=True)
        drawn_BV = super().__call__(input_ids, scores)
        chosen_B, going_B = drawn_BV.argmax(-1), self._going_B[rows_B]
        nats_B = -scores.float().log_softmax(-1).gather(-1, chosen_B[:, None])[:, 0]
        self.nats_B[rows_B] += torch.where(going_B, nats_B, 0)
        self._written(int(going_B.sum()))
        self._going_B[rows_B] = going_B & ~torch.isin(chosen_B, self._ends)
        return drawn_BV


@dataclass(frozen=True)
class VllmRows:
    """A model that vLLM has loaded."""

    engine: VllmEngine
    written: Callable[[int], None]

    def sample(
        self, prompt_ids: list[list[int]], seeds: list[int], decoding: Decoding, ends: Sequence[int]
    ) -> list[Sample]:
        """See RowSampler."""
        samples = self.engine.with_decoding(ends, decoding).sample(prompt_ids, seeds)
        self.written(sum(len(ids) for ids, _ in samples))
        return [Sample(ids, nats) for ids, nats in samples]
