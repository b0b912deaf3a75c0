"""Measures how a model uses its token embedding: as a table that is looked up, and as a head that is tied to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.factorize.install import tied_heads, token_embedding
from llmdistill.factorize.moments import run_passes

ROWS = 1024
"""Rows of logits whose probabilities are computed at a time."""


@dataclass(frozen=True, kw_only=True)
class TableMoments:
    """What calibration data say about a token embedding (V, d), summed over tokens."""

    counts: Tensor
    """(V,), how often each token was looked up."""
    gradients: Tensor | None
    """(d, d), Σ g gᵀ at the table's output; None if no gradients were measured."""
    head_inputs: Tensor | None
    """(d, d), Σ h hᵀ over the inputs of a head that is tied to the table; None without one."""
    head_outputs: Tensor | None
    """(V,), Σ p (1 − p) over the probabilities of the tied head; None without one, or without gradients."""
    tokens: int
    """The number of tokens."""


def measure_table(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    gradients: bool = True,
    seed: int = 0,
    reduce: Callable[[Tensor], object] | None = None,
    rounds: int = 0,
) -> TableMoments:
    """Return the moments of a model's token embedding over the real tokens of batches, in fp32.

    The arguments are those of `factorize.moments.measure_moments`, but `reduce` sums a tensor over the ranks in place
    for all of them.

    Raises:
        UserError: there is no token, or a moment is not finite.
    """
    sums = _TableSums(model, gradients)
    run_passes(model, batches, sums, gradients=gradients, seed=seed, rounds=rounds)
    return sums.moments(reduce)


class _TableSums:
    """Adds up the moments of a token embedding and of its tied head in forward and backward hooks."""

    def __init__(self, model: PreTrainedModel, gradients: bool) -> None:
        name, table = token_embedding(model)
        device, vocabulary, width = model.device, table.num_embeddings, table.embedding_dim
        self._mask = torch.empty(0)
        self._tokens = torch.zeros(1, dtype=torch.float64, device=device)
        self._gradients = gradients
        self._sums = {"counts": torch.zeros(vocabulary, device=device)}
        if gradients:
            self._sums["gradients"] = torch.zeros(width, width, device=device)
        self._handles = [table.register_forward_hook(self._look_up)]
        for head in tied_heads(model, name)[:1]:
            self._sums["head_inputs"] = torch.zeros(width, width, device=device)
            if gradients:
                self._sums["head_outputs"] = torch.zeros(vocabulary, device=device)
            self._handles.append(model.get_submodule(head).register_forward_hook(self._head))

    @contextmanager
    def counting(self, mask_BT: Tensor) -> Iterator[None]:
        """Add up the moments of one forward and backward pass; padding is left out."""
        self._mask = mask_BT
        self._tokens += mask_BT.sum()
        yield

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def moments(self, reduce: Callable[[Tensor], object] | None) -> TableMoments:
        """Return the sums over all ranks."""
        if reduce is not None:
            for each in (self._tokens, *self._sums.values()):
                reduce(each)
        if not self._tokens > 0:
            raise UserError("the calibration data hold no token: name data with at least one example")
        if not all(each.isfinite().all() for each in self._sums.values()):
            raise UserError("the inputs or gradients of the token embedding are not finite on the calibration data")
        missing = dict.fromkeys(("gradients", "head_inputs", "head_outputs"))
        return TableMoments(**{**missing, **self._sums}, tokens=int(self._tokens))  # type: ignore[arg-type]

    def _look_up(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        mask_BT, counts = self._mask, self._sums["counts"]
        counts += torch.bincount(inputs[0][mask_BT], minlength=len(counts))
        if self._gradients:  # no weight requires a gradient, so the graph begins here
            output.requires_grad_(True)
            output.register_hook(lambda gradient: self._add("gradients", gradient.detach()[mask_BT]))

    def _head(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        self._add("head_inputs", inputs[0].detach()[self._mask])
        if self._gradients:
            for logits in output.detach()[self._mask].split(ROWS):
                p = logits.float().softmax(dim=-1)
                self._sums["head_outputs"] += (p - p.square()).sum(dim=0)

    def _add(self, key: str, rows_NK: Tensor) -> None:
        rows = rows_NK.float()
        self._sums[key].addmm_(rows.T, rows)
