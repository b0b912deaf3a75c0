"""Measures the loss on the validation set while a run trains."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from llmdistill.batch import Batch
from llmdistill.methods import Method
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.training.callbacks.base import TrainState
from llmdistill.training.callbacks.finite import LOWER, end_run
from llmdistill.training.trainer import Trainer


@dataclass(frozen=True)
class Validation:
    """Validates every `train.validate_every` steps and after the last one."""

    reads: ClassVar[tuple[str, ...]] = ("settings", "step", "is_finite")
    gives: ClassVar[tuple[str, ...]] = ("validation", "validation_seconds")

    trainer: Trainer
    batches: Sequence[Batch]
    """This rank's share of the validation set: the same number of batches on every rank."""
    method: Method
    """The method whose weighted loss is measured."""
    folder: Path
    """The run's folder."""

    def after_step(self, state: TrainState) -> None:
        """See Callback; a UserError ends the run if the validation loss is not finite."""
        if not state.is_due(state.settings.validate_every):
            return
        assert state.is_finite, "a loss that is not finite is told with its cause, which a validation cannot name"
        began = time.perf_counter()
        loss = self.loss()
        if not math.isfinite(loss):
            end_run(
                self.trainer,
                self.folder,
                state.step,
                f"the validation loss is {loss} at step {state.step}, and the loss before it was finite: look for a "
                f"sample in data.valid that the models cannot read, or {LOWER}",
            )
        state.validation = {"valid_loss": loss}
        state.validation_seconds = time.perf_counter() - began

    def loss(self) -> float:
        """Return the weighted loss on the validation set, each term averaged over its positions; all ranks call it."""
        trainer, method = self.trainer, self.method
        trainer.engine.eval()
        # (2, terms): sums and counts, in fp64, because a set has many batches.
        sums = torch.zeros(2, len(method.weights), dtype=torch.float64, device=World.current().device)
        with torch.no_grad():
            for batch in progress(self.batches, "Validation", "batches"):
                moved = trainer.to_device(batch, method)
                terms = trainer.student.compute_losses(
                    moved, method.bind_terms(trainer.compute_targets(moved, method), moved)
                ).terms
                pairs = [(terms[name].sum.double(), terms[name].count.double()) for name in method.weights]
                sums += torch.stack([torch.stack(pair) for pair in pairs], dim=1)
        trainer.engine.train()
        all_reduce_sum(sums)
        # Divided once, after the sum over the ranks: batches have different numbers of positions.
        means = (sums[0] / sums[1]).tolist()
        return sum(weight * mean for weight, mean in zip(method.weights.values(), means, strict=True))
