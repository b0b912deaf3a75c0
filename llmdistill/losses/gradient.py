"""Losses whose gradient is computed together with the value, so that the forward pass saves no other tensor for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def with_gradient(total: Tensor, *gradients: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the total (a scalar), whose backward pass gives each tensor its gradient times the incoming one.

    `gradients` are pairs of a tensor and the gradient of the total with respect to it, None if it needs none. A
    backward pass with create_graph=True raises RuntimeError.
    """
    if all(gradient is None for _, gradient in gradients):
        return total
    inputs, known = zip(*gradients, strict=True)
    return _KnownGradient.apply(total, known, *inputs)


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: tuple[Tensor | None, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients are on during a backward pass only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError("losses on attention and inner matrices have no second derivative (create_graph=True)")
        (of_total,) = incoming
        return None, None, *(None if x is None else x * of_total.to(x.dtype) for x in ctx.saved_tensors)
