"""Warns once of terms that have nearly none or nearly all of the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from llmdistill.batch import Batch, Outputs
from llmdistill.losses.terms import BoundTerms
from llmdistill.methods import Method
from llmdistill.models.families import family_of, has_family
from llmdistill.runtime.terminal import warn_main
from llmdistill.step.forward import TappedModel
from llmdistill.training.callbacks.base import TrainState
from llmdistill.training.trainer import Trainer

SMALL = 1e-3
"""Share of the gradient below which a term contributes next to nothing."""
LARGE = 0.8
"""Share of the gradient above which a term leaves little to the others."""
_MEASURED_STEP = 10
"""The step after which the gradients of the terms are compared. A student that starts as its teacher has none at
first."""


@dataclass(frozen=True)
class UnevenTerms:
    """Compares the gradients of the terms once, at step 10; not under ZeRO-3, where no rank has whole parameters."""

    reads: ClassVar[tuple[str, ...]] = ("step", "micro_batches")
    gives: ClassVar[tuple[str, ...]] = ()

    trainer: Trainer

    def after_step(self, state: TrainState) -> None:
        """See Callback."""
        trainer, method = self.trainer, self.trainer.method
        if state.step != _MEASURED_STEP or trainer.engine.zero_optimization_stage() == 3 or len(method.weights) == 1:
            return
        batch = trainer.to_device(state.micro_batches[0])
        if len(method.token_terms_of(batch)) < len(method.token_terms):  # those that it leaves out have no gradient
            return

        def compute_targets() -> Outputs | None:
            with torch.no_grad():
                return trainer.compute_targets(batch)

        student = trainer.student.without_engine()
        gradients = term_gradients(method, student, compute_targets, batch)
        for name, (share, remedy) in uneven_terms(gradients).items():
            warn_main(f"term {name} has {share:.1%} of the gradient at step {state.step}: {remedy}")


def uneven_terms(gradients: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Return each term with too small or too large a share of the sum of the norms, the share, and a remedy."""
    total, uneven = math.fsum(gradients.values()), {}
    for name, norm in gradients.items():
        if norm < SMALL * total:
            remedy = "it contributes little: give it a larger weight, or the weight 0 to save its time"
            uneven[name] = norm / total, remedy
        elif norm > LARGE * total and len(gradients) > 1:
            remedy = (
                "it leaves little to the others: give it a smaller weight, or, if it is the squared error of a method "
                "whose setting scale is plain, set that to token (--makd.scale token)"
            )
            uneven[name] = norm / total, remedy
    return uneven


def term_gradients(
    method: Method, student: TappedModel, compute_targets: Callable[[], Outputs | None], batch: Batch
) -> dict[str, float]:
    """Return for each weighted term the norm of its gradient with respect to the input of the student's first layer.

    These gradients need the memory of one activation, where those of the parameters would need that of the student.
    The student runs once for each term, and so does the teacher, because terms use up what it returns. The student's
    parameters are whole on this rank, and it runs without an engine, whose hooks expect a whole step.
    """
    model, divisors = student.model, batch.divisors()
    lowest = model.get_input_embeddings()
    name = family_of(model.config).embedding if has_family(model.config) else None
    if name is not None:
        lowest = model.base_model.get_submodule(name)
    outputs: list[Tensor] = []

    def record(_module: nn.Module, _args: object, output: Tensor) -> None:
        outputs.append(output if output.requires_grad else output.requires_grad_())  # a frozen embedding's does not

    norms: dict[str, float] = {}
    handle = lowest.register_forward_hook(record)
    try:
        for name, weight in method.weights.items():
            if weight != 0:
                outputs.clear()  # each term has a graph of its own
                terms = only_term(method.bind_terms(compute_targets(), batch, divisors), name)
                total = student.compute_losses(batch, terms).total
                (gradient,) = torch.autograd.grad(total, outputs[:1], allow_unused=True)
                norms[name] = 0.0 if gradient is None else float(gradient.float().norm())
    finally:
        handle.remove()
    return norms


def only_term(terms: BoundTerms, name: str) -> BoundTerms:
    """Return the same terms, where all but one have the factor 0."""
    return replace(terms, factors={term: value if term == name else 0.0 for term, value in terms.factors.items()})
