"""On-policy batches: answers that the student generates during training (GKD, Agarwal et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.sampler import StepLoader
from llmdistill.generation.decode import inference, new_tokens

_STEP_KIND, _ROW_NOISE = 1, 2  # keep the random streams of different purposes apart


@dataclass(frozen=True)
class OnPolicyLoader:
    """A loader that replaces the answers of some steps by answers that the current student generates.

    The choice of these steps and the random numbers of every answer depend only on the seed, the step and the
    example's index in the global batch, so they are the same on any number of ranks and in a resumed run.
    """

    loader: StepLoader[Encoded]
    model: PreTrainedModel
    """The student that is trained."""
    share: float
    """λ: the probability that a step is on-policy."""
    seed: int
    max_new_tokens: int
    end_token_ids: list[int]
    pad_token_id: int
    rank: int
    world_size: int
    synced: bool
    """Whether every rank must take part in each forward pass (ZeRO-3)."""

    def is_on_policy(self, step: int) -> bool:
        """Return whether the student generates the answers of this step; the result is the same on every rank."""
        return bool(np.random.default_rng((self.seed, step, _STEP_KIND)).random() < self.share)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro batches of a step."""
        if not self.is_on_policy(step):
            return self.loader.micro_batches(step)
        return [self._answered(step, number, items) for number, items in enumerate(self.loader.micro_batch_items(step))]

    @torch.no_grad()
    def _answered(self, step: int, number: int, items: Sequence[Encoded]) -> Batch:
        """Return a micro batch with the student's answers, each with its end token if it has one."""
        model = self.model
        first_row = (number * self.world_size + self.rank) * len(items)
        seeds = [_row_seed(self.seed, step, first_row + offset) for offset in range(len(items))]
        settings = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=False,  # with the noise, the most likely token is a sample
            eos_token_id=self.end_token_ids,
            pad_token_id=self.pad_token_id,
        )
        prompts = [item.prompt_ids for item in items]
        with inference(model, settings):
            rows = new_tokens(model, prompts, settings, synced=self.synced, noise=RowNoise(seeds, model.device))
        answered = [Encoded(item.prompt_ids, row, item.teacher) for item, row in zip(items, rows, strict=True)]
        return replace(collate(answered, self.pad_token_id), own_answers=True)


class RowNoise(LogitsProcessor):
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
        tiny = torch.finfo(torch.float32).tiny
        return scores.float() - (-uniform_BV.clamp_min(tiny).log()).clamp_min(tiny).log()


def _row_seed(seed: int, step: int, row: int) -> int:
    return int(np.random.SeedSequence((seed, step, row, _ROW_NOISE)).generate_state(1, np.uint64)[0] >> np.uint64(1))
