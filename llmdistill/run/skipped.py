"""Steps that DeepSpeed skips because a gradient is not finite: they are counted, and several in a row end the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World, gather_objects
from llmdistill.runtime.terminal import warn_main

LIMIT = 3
"""Skipped steps in a row that end the run."""
_SHOWN_SAMPLES = 4


@dataclass
class SkippedSteps:
    """Counts the skipped steps of a run."""

    engine: Any
    world: World
    terms: Sequence[str]
    """The names of the terms of the loss."""
    in_a_row: int = 0

    def was_applied(self, step: int, batches: Sequence[Batch], losses: Tensor) -> bool:
        """Whether the step changed the student; a skipped step is reported. Every rank must call this function.

        Args:
            step: the number of the step, from 1.
            batches: this rank's micro batches of the step.
            losses: the terms of each micro batch, (micro batches, terms).

        Raises:
            UserError: it is the third skipped step in a row; the message names the terms, the ranks and the samples.
        """
        if self.engine.was_step_applied():
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        # A skipped step is rare, so the host may wait for the values of the terms here.
        own = [
            (self.world.rank, name, [each for row in batch.sample_ids for each in row])
            for batch, values in zip(batches, losses, strict=True)
            for name, is_finite in zip(self.terms, values.isfinite().tolist(), strict=True)
            if not is_finite
        ]
        found = [each for of_rank in gather_objects(own, self.world) for each in of_rank]
        why = f"step {step} was skipped, because its gradient is not finite: {_described(found)}"
        if self.in_a_row == LIMIT:
            raise UserError(
                f"{why}; it is the {LIMIT}rd in a row: mend or remove these samples, or lower train.learning_rate or "
                "train.max_grad_norm; the student is as it was before them"
            )
        warn_main(f"{why}; the student is unchanged", self.world)
        return False


def _described(found: Sequence[tuple[int, str, list[int]]]) -> str:
    """Describe the terms that are not finite, each with its rank and its samples' ids."""
    if not found:
        return "every term is finite, so it became so in the backward pass"
    ranks = sorted({rank for rank, _, _ in found})
    terms = sorted({term for _, term, _ in found})
    samples = list(dict.fromkeys(str(sample) for *_, samples in found for sample in samples))
    more = f" and {len(samples) - _SHOWN_SAMPLES} more" if len(samples) > _SHOWN_SAMPLES else ""
    return (
        f"{', '.join(terms)} on rank {', '.join(map(str, ranks))}, in the micro batches of the samples "
        f"{', '.join(samples[:_SHOWN_SAMPLES])}{more}"
    )
