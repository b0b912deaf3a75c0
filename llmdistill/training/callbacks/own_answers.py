"""Measures what the student's own answers are worth: how near it is to its teacher there, and to what wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from llmdistill.batch import HeadInputs
from llmdistill.losses.agreement import count_shared, log_probs_of, top_tokens
from llmdistill.report.metrics_log import TOP_SHARED, WRITER_GAP
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.training.callbacks.base import TrainState
from llmdistill.training.trainer import Trainer

_K = 10


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
        if not batch.own_answers:
            return
        trainer, moved = self.trainer, self.trainer.moved(batch)
        labels_N, written_N = moved.row_labels(shift=trainer.student.shift), moved.written_log_probs
        sums = torch.zeros(3, dtype=torch.float64, device=World.current().device)
        trainer.engine.eval()
        with torch.no_grad():
            teacher = trainer.compute_targets(moved)
            taught = None if teacher is None else teacher.lm_head.get("labels")
            top_Nk = None if taught is None else top_tokens(taught, _K, self.vocabulary)

            def compare(head: HeadInputs) -> None:
                sums[0] = len(labels_N)
                if top_Nk is not None:
                    sums[1] = count_shared(head, top_Nk, self.vocabulary)
                if written_N is not None:
                    sums[2] = (log_probs_of(head, labels_N) - written_N).abs().sum()

            trainer.student.inspect_head(moved, compare)
        trainer.engine.train()
        count, shared, gap = all_reduce_sum(sums).tolist()
        state.measures = {
            **({} if top_Nk is None else {TOP_SHARED: shared / (_K * count)}),
            **({} if written_N is None else {WRITER_GAP: gap / count}),
        }
