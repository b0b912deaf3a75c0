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
            do_sample=False,  # with noise on the logits, the most likely token is a sample
            eos_token_id=list(ends),
            pad_token_id=self.pad_token_id,
        )
        sampling = _Sampling(seeds, self.model.device, decoding, list(ends), self.written)
        with inference(self.model, arguments):
            rows = new_tokens(self.model, prompt_ids, arguments, synced=False, noise=sampling)
        return [Sample(ids, nats) for ids, nats in zip(rows, sampling.nats_B.tolist(), strict=True)]


class RowNoise(transformers.LogitsProcessor):
    """Adds Gumbel noise to the logits: the argmax of logits + noise is a sample of the softmax at temperature 1.

    Each row has its own random stream, so its sample does not depend on the other rows of the batch.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits of the next token, (B, V), with noise added."""
        uniform_BV = torch.stack(
            [torch.rand(scores.shape[-1], generator=stream, device=scores.device) for stream in self._streams]
        )
        # torch.rand may return 0, whose logarithm is -inf; both logarithms need an argument over 0.
        tiny = torch.finfo(torch.float32).tiny
        # Gumbel noise is -log(-log u).
        return scores.float() - (-uniform_BV.clamp_min(tiny).log()).clamp_min(tiny).log()


class _Sampling(transformers.LogitsProcessor):
    """Gives logits whose largest is a sample at a temperature and top-p, and adds up the samples' log-probabilities."""

    def __init__(
        self,
        seeds: Sequence[int],
        device: torch.device,
        decoding: Decoding,
        ends: list[int],
        written: Callable[[int], None],
    ) -> None:
        self._noise, self._decoding, self._written = RowNoise(seeds, device), decoding, written
        self._ends = torch.tensor(ends, device=device)
        self._going_B = torch.ones(len(seeds), dtype=torch.bool, device=device)
        self.nats_B = torch.zeros(len(seeds), device=device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits of the next token, (B, V), cut to top-p and with noise added."""
        log_probs_BV = scores.float().log_softmax(-1)
        noisy_BV = self._noise(input_ids, cut_to_top_p(log_probs_BV / self._decoding.temperature, self._decoding.top_p))
        chosen_B = noisy_BV.argmax(-1)
        nats_B = -log_probs_BV.gather(-1, chosen_B[:, None])[:, 0]
        self.nats_B += torch.where(self._going_B, nats_B, 0)
        self._written(int(self._going_B.sum()))
        self._going_B &= ~torch.isin(chosen_B, self._ends)
        return noisy_BV


def cut_to_top_p(logits_BV: Tensor, top_p: float, most: int = 1024) -> Tensor:
    """Return logits with -inf but for the smallest set of tokens whose total probability is at least top_p.

    Only the `most` likely tokens are sorted where they are enough.
    """
    if top_p >= 1:
        return logits_BV
    probs_BV = logits_BV.softmax(-1)
    most = min(most, logits_BV.shape[-1])
    top_BK, tokens_BK = probs_BV.topk(most)
    if bool((top_BK.sum(-1) < top_p).any()):
        top_BK, tokens_BK = probs_BV.sort(descending=True)
    # A token stays if those before it are less than top_p, so that the first one always does.
    stays_BK = top_BK.cumsum(-1) - top_BK < top_p
    kept_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(-1, tokens_BK, stays_BK)
    return logits_BV.masked_fill(~kept_BV, -torch.inf)


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
