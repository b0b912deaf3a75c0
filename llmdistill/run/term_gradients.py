"""Measures how much each term of a loss moves the student, by the gradient that reaches its lowest layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch, Outputs, Positions
from llmdistill.losses.terms import RunningTerms
from llmdistill.methods import Method
from llmdistill.models.families import family_of, has_family
from llmdistill.models.forward import TappedModel


def term_gradients(
    method: Method,
    model: PreTrainedModel,
    student: TappedModel,
    teach: Callable[[], Outputs | None],
    batch: Batch,
    divisors: Mapping[Positions, Tensor],
) -> dict[str, float]:
    """Return for each weighted term the norm of its gradient with respect to the input of the student's first layer.

    These gradients need the memory of one activation, where those of the parameters would need that of the student.
    The student runs once for each term, and so does the teacher, because terms use up what it returns.

    Args:
        method: the terms.
        model: the student, whose parameters are whole on this rank.
        student: the forward pass of this model, without an engine, whose hooks expect a whole step.
        teach: runs the teacher on the batch; None without one.
        batch: a micro batch on the device of the models.
        divisors: the divisor of the sums over each kind of position.
    """
    lowest = model.get_input_embeddings()
    name = family_of(model.config).embedding if has_family(model.config) else None
    if name is not None:
        lowest = model.base_model.get_submodule(name)
    return {
        name: _norm(student, alone(method.running(teach(), batch, divisors), name), lowest, batch)
        for name, weight in method.weights.items()
        if weight != 0
    }


def alone(terms: RunningTerms, name: str) -> RunningTerms:
    """Return the same terms, where all but one have the factor 0."""
    return replace(terms, factors={each: value if each == name else 0.0 for each, value in terms.factors.items()})


def _norm(student: TappedModel, terms: RunningTerms, lowest: nn.Module, batch: Batch) -> float:
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor) -> None:
        outputs.append(output if output.requires_grad else output.requires_grad_())  # a frozen embedding's does not

    handle = lowest.register_forward_hook(keep)
    try:
        total = student.learn(batch, terms).total
    finally:
        handle.remove()
    (found,) = torch.autograd.grad(total, outputs[:1], allow_unused=True)
    return 0.0 if found is None else float(found.float().norm())
