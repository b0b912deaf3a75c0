"""Warns once of terms that have nearly none or nearly all of the gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from llmdistill.batch import Outputs
from llmdistill.run.callbacks.base import TrainState
from llmdistill.run.term_gradients import term_gradients
from llmdistill.run.trainer import Trainer
from llmdistill.runtime.terminal import warn_main

SMALL = 1e-3
"""Share of the gradient below which a term hardly teaches."""
LARGE = 0.8
"""Share of the gradient above which a term leaves little to the others."""
_MEASURED_STEP = 10
"""The step after which the gradients of the terms are compared. A student that starts as its teacher has none at
first."""


@dataclass(frozen=True)
class UnevenTerms:
    """Compares the gradients of the terms once, on a micro batch of step 10.

    Under ZeRO-3 no rank has whole parameters, so nothing is said.
    """

    trainer: Trainer

    def after_step(self, state: TrainState) -> None:
        """See Callback."""
        trainer, method = self.trainer, self.trainer.method
        if state.step != _MEASURED_STEP or trainer.engine.zero_optimization_stage() == 3 or len(method.weights) == 1:
            return
        batch = trainer.moved(state.micro_batches[0])
        if batch.own_answers:  # they are no labels, so the terms on labels have no gradient
            return

        def teach() -> Outputs | None:
            with torch.no_grad():
                return trainer.teach(batch)

        student = trainer.student.without_engine()
        found = term_gradients(method, trainer.student.model, student, teach, batch, batch.divisors())
        for name, (share, remedy) in uneven_terms(found).items():
            warn_main(f"term {name} has {share:.1%} of the gradient at step {state.step}: {remedy}", trainer.world)


def uneven_terms(gradients: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Return each term with too small or too large a share of the gradient: the share, and what to do about it.

    Args:
        gradients: the norm of each term's gradient, of which the shares are those in the sum.
    """
    total, found = math.fsum(gradients.values()), {}
    for name, norm in gradients.items():
        if norm < SMALL * total:
            remedy = "it hardly teaches: give it a larger weight, or the weight 0 to save its time"
            found[name] = norm / total, remedy
        elif norm > LARGE * total and len(gradients) > 1:
            remedy = (
                "it leaves little to the others: give it a smaller weight, or, if it is the squared error of a method "
                "whose setting scale is plain, set that to token (--makd.scale token)"
            )
            found[name] = norm / total, remedy
    return found
