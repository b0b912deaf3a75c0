"""On-policy batches: answers that the student writes itself while it learns (GKD, Agarwal et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.data.collate import collate
from llmdistill.data.instruct import Encoded
from llmdistill.generation.decode import inference, new_tokens

_STEP_KIND, _ROW_NOISE = 1, 2  # keep the random streams of different purposes apart


class ItemLoader(Protocol):
    """A loader that also shows the examples behind its batches."""

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step."""
        ...

    def micro_batch_items(self, step: int) -> list[list[Encoded]]:
        """The examples of each of them."""
        ...


@dataclass(frozen=True)
class OnPolicyLoader:
    """A loader some of whose steps have answers by the student, as it is at that step, to the same prompts.

    Which steps, and the random numbers of every answer, follow from seed, step and the example's place in the global
    batch: the same on any number of ranks, and again when a run is resumed.
    """

    loader: ItemLoader
    model: PreTrainedModel
    """The student that is trained."""
    share: float
    """λ: the chance of a step to be on-policy."""
    seed: int
    max_new_tokens: int
    end_token_id: int
    pad_token_id: int
    rank: int
    world_size: int
    synced: bool
    """Whether the forward pass needs every rank (ZeRO-3)."""

    def is_on_policy(self, step: int) -> bool:
        """Whether the student writes the answers of this step; every rank says the same."""
        return bool(np.random.default_rng((self.seed, step, _STEP_KIND)).random() < self.share)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step."""
        if not self.is_on_policy(step):
            return self.loader.micro_batches(step)
        return [self._answered(step, number, items) for number, items in enumerate(self.loader.micro_batch_items(step))]

    @torch.no_grad()
    def _answered(self, step: int, number: int, items: Sequence[Encoded]) -> Batch:
        """A micro batch with the student's answers, the end token included where it came."""
        model = self.model
        first_row = (number * self.world_size + self.rank) * len(items)
        seeds = [_row_seed(self.seed, step, first_row + offset) for offset in range(len(items))]
        settings = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=False,  # the noise makes the likeliest token a sample
            eos_token_id=self.end_token_id,
            pad_token_id=self.pad_token_id,
        )
        prompts = [item.prompt_ids for item in items]
        with inference(model, settings):
            rows = new_tokens(model, prompts, settings, synced=self.synced, noise=RowNoise(seeds, model.device))
        answered = [Encoded(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        return replace(collate(answered, self.pad_token_id), own_answers=True)


class RowNoise(LogitsProcessor):
    """Gumbel noise on the logits: the largest of logit + noise is a sample of the softmax at temperature 1.

    Each row has a stream of its own, so its sample does not depend on which rows share its batch.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._streams = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) scores of the next token, with noise."""
        uniform_BV = torch.stack(
            [torch.rand(scores.shape[-1], generator=stream, device=scores.device) for stream in self._streams]
        )
        tiny = torch.finfo(torch.float32).tiny
        return scores.float() - (-uniform_BV.clamp_min(tiny).log()).clamp_min(tiny).log()


def _row_seed(seed: int, step: int, row: int) -> int:
    return int(np.random.SeedSequence((seed, step, row, _ROW_NOISE)).generate_state(1, np.uint64)[0] >> np.uint64(1))
