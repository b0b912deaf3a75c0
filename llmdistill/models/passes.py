"""Runs a model over calibration data while hooks add up what its modules read, return and get as gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.errors import UserError


class HookSums:
    """Adds up values over the real tokens of batches; a subclass registers the hooks that do so in `handles`."""

    def __init__(self, device: torch.device) -> None:
        """Count tokens on the device of the model."""
        self.handles: list[RemovableHandle] = []
        self.mask = torch.empty(0)
        """(B, T), the positions of the pass that count."""
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        """The number of tokens so far."""

    @contextmanager
    def counting(self, mask_BT: Tensor) -> Iterator[None]:
        """Add up the values of one pass at the positions of the mask; padding is left out."""
        self.mask = mask_BT
        self.tokens += mask_BT.sum()
        yield

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def counted(self, sums: Iterable[tuple[str, Tensor]]) -> int:
        """Return the number of tokens.

        Args:
            sums: what was added up, each after what a user would call it.

        Raises:
            UserError: there is no token, or a sum is not finite.
        """
        if not self.tokens > 0:
            raise UserError("the calibration data hold no token: name data with at least one example")
        for what, each in sums:
            if not each.isfinite().all():
                raise UserError(
                    f"{what} are not finite on the calibration data: name other data, or load the model as fp32"
                )
        return int(self.tokens)


def run_passes(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    sums: HookSums,
    step: Callable[[Batch], object],
    *,
    rounds: int = 0,
) -> None:
    """Run a model in evaluation mode over batches while `sums` counts, and remove the hooks of `sums` then.

    Args:
        model: the model, whose mode stays as it is.
        batches: the batches of this rank, on any device; each rank needs at least one.
        sums: counts the real tokens.
        step: what is done with a batch on the model's device, such as a forward and a backward pass.
        rounds: the smallest number of passes; a rank with fewer batches repeats its own without counting them, because
            the ranks of a sharded model need each other in every pass.
    """
    batches, training = list(batches), model.training
    model.eval()
    try:
        for number in range(max(len(batches), rounds) if batches else 0):
            moved = batches[number % len(batches)].to(model.device)
            with sums.counting((moved.attention_mask != 0) & (number < len(batches))):
                step(moved)
    finally:
        sums.remove()
        model.train(training)
