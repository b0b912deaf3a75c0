"""On-policy batches: answers that the student generates during training (GKD, Agarwal et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.random_streams import ANSWER, STEP_KIND
from llmdistill.data.sampler import StepLoader
from llmdistill.generation.decode import inference, new_tokens
from llmdistill.generation.row_draws import RowDraws


class Prompt(NamedTuple):
    """A prompt to answer, and the seed of the random numbers of its answer."""

    ids: list[int]
    seed: int


class WrittenAnswer(NamedTuple):
    """An answer, with its end token if it has one."""

    ids: list[int]
    log_probs: list[float]
    """Of each token, under the model that wrote it; empty if unknown."""


class Writer(Protocol):
    """Writes the answers of the student: samples of its distribution at temperature 1."""

    def write(self, step: int, micro_batches: Sequence[Sequence[Prompt]]) -> list[list[WrittenAnswer]]:
        """Return the answers of a step (from 0) to this rank's prompts. Every rank must call this function."""
        ...


@dataclass(frozen=True)
class OnPolicyLoader:
    """A loader that replaces the answers of some steps by answers that the current student generates.

    The choice of these steps and the random numbers of every answer depend only on the seed, the step and the
    example's index in the global batch, so they are the same on any number of ranks and in a resumed run.
    """

    loader: StepLoader[Encoded]
    writer: Writer
    on_policy: float
    """λ: the probability that a step is on-policy."""
    pad_token_id: int

    def is_on_policy(self, step: int) -> bool:
        """Return whether the student generates the answers of this step, on every rank."""
        return bool(np.random.default_rng((self.loader.share.seed, step, STEP_KIND)).random() < self.on_policy)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro batches of a step."""
        if not self.is_on_policy(step):
            return self.loader.micro_batches(step)
        share, micro_batches = self.loader.share, self.loader.micro_batch_items(step)
        prompts: list[list[Prompt]] = []
        for number, items in enumerate(micro_batches):
            # The index in the global batch, so that a row's random numbers do not depend on the number of ranks.
            first_row = (number * share.world_size + share.rank) * len(items)
            prompts.append([])
            for row, item in enumerate(items, first_row):
                [state] = np.random.SeedSequence((share.seed, step, row, ANSWER)).generate_state(1, np.uint64)
                prompts[-1].append(Prompt(item.last_prompt, int(state >> np.uint64(1))))  # 63 bits fit into int64
        batches = []
        for items, written in zip(micro_batches, self.writer.write(step, prompts), strict=True):
            # The prompt of the student's answer is the last one of the example, without the turns of the data after it.
            answered = [
                Encoded(item.last_prompt, answer.ids, item.teacher) for item, answer in zip(items, written, strict=True)
            ]
            log_probs = torch.tensor([value for answer in written for value in answer.log_probs])
            batches.append(
                replace(
                    collate(answered, self.pad_token_id),
                    labels_are="samples",
                    written_log_probs=log_probs if len(log_probs) else None,
                )
            )
        return batches


@dataclass(frozen=True)
class StudentWriter:
    """The student itself, by transformers' generate: a micro batch at once, on a GPU more if its memory holds them."""

    model: PreTrainedModel
    """The student that is trained."""
    max_new_tokens: int
    end_token_ids: list[int]
    pad_token_id: int
    synced: bool
    """Whether every rank must take part in each forward pass (ZeRO-3)."""

    def write(self, step: int, micro_batches: Sequence[Sequence[Prompt]]) -> list[list[WrittenAnswer]]:
        """See Writer."""
        sizes = [len(prompts) for prompts in micro_batches]
        # The rows of all micro batches take each other's places. ZeRO-3 needs all ranks in each batch.
        groups, at_once = micro_batches, None
        if not self.synced:
            groups, at_once = [[prompt for prompts in micro_batches for prompt in prompts]], max(sizes)
        written = iter([answer for prompts in groups for answer in self._generate(prompts, at_once)])
        return [[next(written) for _ in range(size)] for size in sizes]

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], at_once: int | None) -> list[WrittenAnswer]:
        model = self.model
        settings = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=False,  # RowDraws leaves only the token that it drew
            eos_token_id=self.end_token_ids,
            pad_token_id=self.pad_token_id,
        )
        draws = RowDraws([prompt.seed for prompt in prompts])
        ids = [prompt.ids for prompt in prompts]
        with inference(model, settings):
            rows = dict(new_tokens(model, ids, settings, at_once=at_once, draws=draws))
        return [WrittenAnswer(rows[row], []) for row in range(len(prompts))]
