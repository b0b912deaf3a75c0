"""Whether a training is healthy: finite numbers, a loss that does not jump, terms that teach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmdistill.training.callbacks.base import Accumulator, Callback, TrainState, check_order
from llmdistill.training.callbacks.finite import FiniteSteps
from llmdistill.training.callbacks.loss_watch import LossWatch
from llmdistill.training.callbacks.uneven_terms import UnevenTerms
from llmdistill.training.plan import Plan
from llmdistill.training.trainer import Trainer


@dataclass(frozen=True)
class Health:
    """Looks at each step by one watch after the other. What one of them finds is read by those after it."""

    # What FiniteSteps gives comes from within; it is the first, so it alone gives what a later watch reads.
    reads: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(
            field
            for watch in (FiniteSteps, LossWatch, UnevenTerms)
            for field in watch.reads
            if field not in FiniteSteps.gives
        )
    )
    gives: ClassVar[tuple[str, ...]] = (*FiniteSteps.gives, *LossWatch.gives, *UnevenTerms.gives)

    watches: Sequence[Callback]
    accumulators: Mapping[str, Accumulator]
    """Those of them whose figures a checkpoint keeps, by their names there."""

    @classmethod
    def of(cls, plan: Plan, trainer: Trainer, rows: Sequence[Mapping[str, float]]) -> Health:
        """Return the watches of a run, whose log has these rows so far."""
        finite, loss = FiniteSteps(trainer, plan.folder), LossWatch(plan.method.weights, rows)
        watches: list[Callback] = [finite, loss, UnevenTerms(trainer)]
        check_order(watches)
        return cls(watches, {"loss": loss, "finite": finite})

    def after_step(self, state: TrainState) -> None:
        """See Callback. Every rank must call it."""
        for watch in self.watches:
            watch.after_step(state)
