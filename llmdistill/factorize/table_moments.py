"""Measures how a model uses its token embedding: as a table that is looked up, and as a head that is tied to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.factorize.install import tied_heads, token_embedding
from llmdistill.factorize.sampled import run_sampled
from llmdistill.models.passes import HookSums


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
    run_sampled(model, batches, sums, gradients=gradients, seed=seed, rounds=rounds, what="Calibrating the embedding")
    return sums.moments(reduce)


class _TableSums(HookSums):
    """Adds up the moments of a token embedding and of its tied head in forward and backward hooks."""

    def __init__(self, model: PreTrainedModel, gradients: bool) -> None:
        super().__init__(model.device)
        name, table = token_embedding(model)
        device, vocabulary, width = model.device, table.num_embeddings, table.embedding_dim
        self._gradients = gradients
        self._sums = {"counts": torch.zeros(vocabulary, device=device)}
        if gradients:
            self._sums["gradients"] = torch.zeros(width, width, device=device)
        self.handles = [table.register_forward_hook(self._look_up)]
        for head in tied_heads(model, name)[:1]:
            self._sums["head_inputs"] = torch.zeros(width, width, device=device)
            if gradients:
                self._sums["head_outputs"] = torch.zeros(vocabulary, device=device)
            self.handles.append(model.get_submodule(head).register_forward_pre_hook(self._head))

    def moments(self, reduce: Callable[[Tensor], object] | None) -> TableMoments:
        """Return the sums over all ranks."""
        if reduce is not None:
            for each in (self.tokens, *self._sums.values()):
                reduce(each)
        tokens = self.counted(("the inputs or gradients of the token embedding", each) for each in self._sums.values())
        missing = dict.fromkeys(("gradients", "head_inputs", "head_outputs"))
        return TableMoments(**{**missing, **self._sums}, tokens=tokens)  # type: ignore[arg-type]

    def _look_up(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        mask_BT, counts = self.mask, self._sums["counts"]
        counts += torch.bincount(inputs[0][mask_BT], minlength=len(counts))
        if self._gradients:  # no weight requires a gradient, so the graph begins here
            output.requires_grad_(True)
            output.register_hook(lambda gradient: self._add("gradients", gradient.detach()[mask_BT]))

    def _head(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows_NK, mask_N = inputs[0].detach().flatten(0, 1), self.mask.flatten()
        # A head that is taken over has the rows of the real tokens alone, also in a pass that does not count.
        if mask_N.any():
            self._add("head_inputs", rows_NK[mask_N] if len(rows_NK) == len(mask_N) else rows_NK)

    def judged(self, p_NV: Tensor) -> None:
        """Add up p (1 − p) of the tied head."""
        if "head_outputs" in self._sums and self.mask.any():
            self._sums["head_outputs"] += (p_NV - p_NV.square()).sum(dim=0)

    def _add(self, key: str, rows_NK: Tensor) -> None:
        rows = rows_NK.float()
        self._sums[key].addmm_(rows.T, rows)
