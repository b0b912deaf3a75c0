"""Runs a model over calibration data while hooks add up what its modules read, return and get as gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.progress import Activity


class HookSums:
    """Adds up values over the real tokens of batches; a subclass registers the hooks that do so in `handles`."""

    def __init__(self, device: torch.device) -> None:
        """Count tokens on the device of the model."""
        self.handles: list[RemovableHandle] = []
        self.mask = torch.empty(0)
        """(B, T), the positions of the pass that count."""
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        """The number of tokens so far."""
        self.phase: Literal["kept", "dropped", "again"] = "kept"
        """Whether the tensors of the layer that runs are kept for the backward pass, are dropped, or are computed again
        in the backward pass."""

    def count(self, mask_BT: Tensor) -> None:
        """Let the next pass be added up at the positions of the mask; padding is left out."""
        self.mask = mask_BT
        self._is_whole = bool(mask_BT.all())
        self.tokens += mask_BT.sum()

    def rows(self, values_BTK: Tensor) -> Tensor:
        """Return the values (N, K) of a pass at the positions that count."""
        return values_BTK.detach().flatten(0, 1) if self._is_whole else values_BTK.detach()[self.mask]

    def judged(self, p_NV: Tensor) -> None:
        """Take the probabilities of some rows that count, in the passes with gradients; by default nothing is done."""

    @contextmanager
    def during(self, phase: Literal["dropped", "again"]) -> Iterator[None]:
        """Block in which a layer runs whose tensors are dropped, or computed again."""
        self.phase = phase
        try:
            yield
        finally:
            self.phase = "kept"

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


def rows_of(batch: Batch, rows: slice | list[int], longest: int | None = None) -> Batch:
    """Some rows of a batch that is not located yet, without the padding on the right that none of them needs.

    `longest` is the number of tokens that are left of each at most.
    """
    real_T = (batch.attention_mask[rows] != 0).any(0).nonzero()
    length = min(int(real_T[-1]) + 1 if len(real_T) else 1, batch.input_ids.shape[1] if longest is None else longest)
    of_tokens = ("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids", "visible_until")
    given = {name: getattr(batch, name) for name in of_tokens if getattr(batch, name) is not None}
    cut: dict[str, Any] = {name: each[rows, :length] for name, each in given.items()}
    if batch.visible_until is not None:
        cut["visible_until"] = cut["visible_until"].clamp(max=length)  # at padding it is the length
    if batch.targets is not None:
        cut["targets"] = batch.targets[rows]
    numbers = range(len(batch.input_ids))[rows] if isinstance(rows, slice) else rows
    for name in ("sample_ids", "teachers"):
        each = getattr(batch, name)
        cut[name] = tuple(each[number] for number in numbers) if each else ()
    return replace(batch, **cut)


def in_parts(batches: Iterable[Batch], tokens: int) -> list[Batch]:
    """The same rows in parts of at most so many tokens, padding included; a longer row is a part of its own.

    The number of parts follows from the shape of each batch.
    """
    parts = []
    for batch in batches:
        rows, length = batch.input_ids.shape
        each = max(1, tokens // length)
        parts += [rows_of(batch, slice(start, start + each)) for start in range(0, rows, each)]
    return parts


def run_passes(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    sums: HookSums,
    step: Callable[[Batch], object],
    *,
    rounds: int = 0,
    what: str = "Calibrating",
    done: int = 0,
    after: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Run a model in evaluation mode over batches while `sums` counts, and remove the hooks of `sums` then.

    Args:
        model: the model, whose mode stays as it is.
        batches: the batches of this rank, on any device; each rank needs at least one.
        sums: counts the real tokens.
        step: what is done with a batch on the model's device, such as a forward and a backward pass.
        rounds: the smallest number of passes; a rank with fewer batches repeats its own without counting them, because
            the ranks of a sharded model need each other in every pass.
        what: the name of this work in its bar and lines.
        done: the number of passes that `sums` has counted already.
        after: is called after each pass with the number of passes that are done, and of all.
    """
    batches, training = list(batches), model.training
    model.eval()
    total = max(len(batches), rounds) if batches else 0
    try:
        with Activity(what, total, "batches", done=done) as activity:
            for number in range(done, total):
                moved = batches[number % len(batches)].to(model.device)
                sums.count((moved.attention_mask != 0) & (number < len(batches)))
                step(moved)
                activity.advance()
                after(number + 1, total)
    finally:
        sums.remove()
        model.train(training)
