"""Answers that the student writes during its training (data.on_policy): what writes them, and what they are worth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from llmdistill.batch import HeadInputs
from llmdistill.data.collate import Encoded
from llmdistill.data.prompts import answer_ends
from llmdistill.data.sampler import StepLoader
from llmdistill.generation.rollout import OnPolicyLoader, StudentWriter, Writer
from llmdistill.generation.rollout_server import RolloutServer, ServerWriter
from llmdistill.losses.agreement import count_shared, log_probs_of, top_tokens
from llmdistill.report.metrics_log import TOP_SHARED, WRITER_GAP
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.training.callbacks.base import Callback, TrainState
from llmdistill.training.checks import HANDED_OVER
from llmdistill.training.plan import Plan
from llmdistill.training.trainer import Trainer

_K = 10  # the ten of TOP_SHARED


def describe_share(plan: Plan) -> str:
    """Return what the first lines of a run add to its data."""
    share = plan.config.data.on_policy
    return f"; the student writes {share:.0%} of it" if share > 0 else ""


def rollout_server(plan: Plan, end_token_ids: list[int], vocabulary: int) -> RolloutServer:
    """Return the client of the server that writes the student's answers (data.rollout.url)."""
    data = plan.config.data
    assert data.rollout.url is not None
    return RolloutServer(
        data.rollout.url,
        vocabulary=vocabulary,
        max_new_tokens=data.max_length - data.max_prompt_length,
        end_token_ids=end_token_ids,
        wait=data.rollout.wait,
    )


def make_rollout_loader(
    plan: Plan, loader: StepLoader[Encoded], engine: Any, tokenizer: Any, save: Callable[[Path], None]
) -> OnPolicyLoader:
    """Return the loader whose answers the student writes in some steps; `save` saves it for a server that does."""
    config = plan.config
    ends = answer_ends(tokenizer, engine.module.generation_config)
    writer: Writer
    if config.data.rollout.url is None:
        writer = StudentWriter(
            engine.module,
            max_new_tokens=config.data.max_length - config.data.max_prompt_length,
            end_token_ids=ends,
            pad_token_id=tokenizer.pad_token_id,
            # ZeRO-3 gathers parameters in each forward pass, so the ranks write equally many tokens.
            synced=engine.zero_optimization_stage() == 3,
        )
    else:
        writer = ServerWriter(
            rollout_server(plan, ends, engine.module.config.vocab_size),
            save,
            folder=plan.folder / HANDED_OVER,
            every=config.data.rollout.every,
        )
    return OnPolicyLoader(
        loader,
        writer,
        on_policy=config.data.on_policy,
        pad_token_id=tokenizer.pad_token_id,
    )


def rollout_callbacks(plan: Plan, trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a run whose student writes answers; none for another run."""
    return [OwnAnswers(trainer, plan.models.vocabulary)] if plan.config.data.on_policy > 0 else []


@dataclass(frozen=True)
class OwnAnswers:
    """Compares, for each row of the log, the models on the first micro batch of the next step.

    On it the student is still the one that has written the answers, or that was handed over to what has.
    """

    reads: ClassVar[tuple[str, ...]] = ("settings", "step", "failure")
    gives: ClassVar[tuple[str, ...]] = ("measures",)

    trainer: Trainer
    vocabulary: int | None
    """Only so many logits of each model are compared; None compares all."""

    def after_step(self, state: TrainState) -> None:
        """See Callback. Every rank must call it."""
        if state.is_last or state.failure is not None or not state.is_due(state.settings.log_every):
            return
        batch, *_ = self.trainer.micro_batches(state.step)
        if not batch.has_sampled_labels:
            return
        trainer, moved = self.trainer, self.trainer.to_device(batch)
        labels_N, written_N = moved.row_labels(shift=trainer.student.shift), moved.written_log_probs
        # Labels, shared tokens, and differences of log-probabilities.
        sums = torch.zeros(3, dtype=torch.float64, device=World.current().device)
        trainer.engine.eval()
        with torch.no_grad():
            teacher = trainer.compute_targets(moved)
            targets = None if teacher is None else teacher.lm_head.get("labels")
            top_Nk = None if targets is None else top_tokens(targets, _K, self.vocabulary)

            def compare(head: HeadInputs) -> None:
                sums[0] = len(labels_N)
                if top_Nk is not None:
                    sums[1] = count_shared(head, top_Nk, self.vocabulary)
                if written_N is not None:
                    sums[2] = (log_probs_of(head, labels_N) - written_N).abs().sum()

            trainer.student.inspect_head(moved, compare)
        trainer.engine.train()
        count, shared, gap = all_reduce_sum(sums).tolist()
        if top_Nk is not None:
            state.measures[TOP_SHARED] = shared / (_K * count)
        if written_N is not None:
            state.measures[WRITER_GAP] = gap / count
