"""Measures how a model uses its token embedding: how often each token is looked up, and what the loss depends on.

`weighted_embedding` says what the sums are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.step.passes import HookSums, Passes, hook_gradient
from llmdistill.students.install import scale_of_rows, tied_heads, token_embedding
from llmdistill.students.start.sampled import USUAL, Sampling, run_sampled


@dataclass(frozen=True, kw_only=True)
class TableMoments:
    """What calibration data say about a token embedding (V, d), summed over tokens."""

    counts: Tensor
    """(V,), how often each token was looked up."""
    gradients: Tensor | None = None
    """(d, d), Σ g gᵀ at the rows that were looked up; None if no gradients were measured."""
    head_inputs: Tensor | None = None
    """(d, d), Σ h hᵀ over the inputs of a head that is tied to the table; None without one."""
    head_outputs: Tensor | None = None
    """(V,), Σ p (1 − p) over the probabilities of the tied head; None without one, or without gradients."""
    tokens: int
    """The number of tokens."""


def measure_table(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    sampling: Sampling = USUAL,
    *,
    reduce: Callable[[Tensor], object] | None = None,
) -> TableMoments:
    """Return the moments of a model's token embedding over the real tokens of batches, in fp32.

    The arguments are those of `students.start.moments.measure_moments`, but `reduce` sums a tensor over the ranks in
    place for all of them.

    Raises:
        UserError: there is no token, or a moment is not finite.
    """
    name, _ = token_embedding(model)
    passes = Passes(rounds=sampling.rounds, what="Calibrating the embedding")
    sums = run_sampled(model, [name], batches, lambda _: _Alone(model, sampling.gradients), sampling, passes)
    if reduce is not None:
        for tensor in (sums.tokens, *sums.table.sums.values()):
            reduce(tensor)
    return sums.table.moments(sums.count_tokens(sums.table.totals()))


class TableSums:
    """Adds up the moments of a token embedding and of its tied head in forward and backward hooks."""

    def __init__(self, model: PreTrainedModel, gradients: bool, passes: HookSums) -> None:
        """Register the hooks with the sums that count the tokens of the passes."""
        self._passes = passes
        name, table = token_embedding(model)
        device, vocabulary, width = model.device, table.num_embeddings, table.embedding_dim
        self._gradients, self._scale = gradients, scale_of_rows(table) or 1.0
        self.sums = {"counts": torch.zeros(vocabulary, device=device)}
        if gradients:
            self.sums["gradients"] = torch.zeros(width, width, device=device)
        passes.handles.append(table.register_forward_hook(self._add_lookups))
        for head in tied_heads(model, name)[:1]:
            self.sums["head_inputs"] = torch.zeros(width, width, device=device)
            if gradients:
                self.sums["head_outputs"] = torch.zeros(vocabulary, device=device)
            passes.handles.append(model.get_submodule(head).register_forward_pre_hook(self._add_head_inputs))

    def resume(self, sums: Mapping[str, Tensor]) -> None:
        """Go on from the sums of an interrupted measurement."""
        self.sums |= {key: sums[key] for key in self.sums}

    def totals(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what `HookSums.count_tokens` checks."""
        for tensor in self.sums.values():
            yield "the inputs or gradients of the token embedding", tensor.sum(dtype=torch.float64)

    def moments(self, tokens: int) -> TableMoments:
        return TableMoments(**self.sums, tokens=tokens)

    def _add_lookups(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        # Ids (B, T) as values (B, T, 1), of which `check` and `rows` know the axes
        self._passes.check("", inputs[0][..., None])
        counts = self.sums["counts"]
        counts += torch.bincount(self._passes.rows(inputs[0][..., None])[:, 0], minlength=len(counts))
        return (
            # Of the rows of the table, from which the output may differ by a factor (Gemma)
            hook_gradient(output, lambda gradient: self._add("gradients", self._scale * self._passes.rows(gradient)))
            if self._gradients
            else None
        )

    def _add_head_inputs(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows_NK, mask_N = inputs[0].detach().flatten(0, 1), self._passes.mask.flatten()
        # A head that runs in chunks gets the rows of the real tokens alone, even in a pass that does not count.
        if mask_N.any():
            self._add("head_inputs", rows_NK[mask_N] if len(rows_NK) == len(mask_N) else rows_NK)

    def add_probabilities(self, p_NV: Tensor) -> None:
        """Add up p (1 − p) of the tied head."""
        if "head_outputs" in self.sums and self._passes.mask.any():
            self.sums["head_outputs"] += (p_NV - p_NV.square()).sum(dim=0)

    def _add(self, key: str, rows_NK: Tensor) -> None:
        rows = rows_NK.float()
        self.sums[key].addmm_(rows.T, rows)


class _Alone(HookSums):
    """The moments of a token embedding in passes of their own."""

    def __init__(self, model: PreTrainedModel, gradients: bool) -> None:
        super().__init__(model.device)
        self.table = TableSums(model, gradients, self)

    def add_probabilities(self, p_NV: Tensor) -> None:
        self.table.add_probabilities(p_NV)
