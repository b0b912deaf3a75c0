"""Whether a training is healthy: finite numbers, a loss that does not jump, terms that contribute."""

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
    """Looks at each step by several watches in order; a watch may read what those before it have found."""

    # FiniteSteps runs first, and is the only watch whose findings others read: they come from within.
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
    """The watches whose figures a checkpoint keeps, by their names there."""

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
