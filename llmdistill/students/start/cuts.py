"""Tries lower ranks on a loaded model, without a second one: its linears and its token embedding return what those of a
student would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.batch import Batch, HeadInputs
from llmdistill.internals.torch_names import add_in_place, version_of
from llmdistill.losses.divergence import FORWARD_KL
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm
from llmdistill.models.sharded import gathered
from llmdistill.progress import progress
from llmdistill.step.forward import TappedModel
from llmdistill.step.passes import HookSums, OddReadError, Passes, hook_gradient
from llmdistill.students.install import matrix, scale_of_rows, tied_heads, token_embedding
from llmdistill.students.start.sampled import (
    USUAL,
    Reads,
    Sampling,
    judged_rows,
    run_sampled,
    running_as,
    tapped_output,
)
from llmdistill.students.start.weighted import WeightedSVD
from llmdistill.students.start.weighted_embedding import WeightedTable
from llmdistill.students.start.weighted_factors import WeightedFactors, held_at
from llmdistill.students.svd import truncated_svd


def cut(model: PreTrainedModel, weighted: WeightedFactors) -> AbstractContextManager[None]:
    """Within this block, linears and token embedding of a dense model return what the student's would; the model keeps
    its weights.

    The products are computed in fp32, and each factor is moved to the device of the inputs when it is needed, so this
    takes the memory of one matrix. A head that is tied to the token embedding stays dense. Moments that are measured
    inside this block are those of the cut model.
    """

    def plain(linear: nn.Module, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        return truncated_svd(matrix(linear).detach(), rank)

    def leading(measured: WeightedSVD, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        factors = measured.leading(rank)
        return factors.left, factors.values, factors.right

    def multiply(linear: nn.Module, factors: Callable[[], tuple[Tensor, Tensor, Tensor]], inputs: Tensor) -> Tensor:
        left, values, right = (factor.to(inputs.device) for factor in factors())
        product = functional.linear(functional.linear(inputs.float(), right) * values, left)
        bias = cast("Tensor | None", linear.bias)
        return (product if bias is None else product + bias.float()).to(inputs.dtype)

    def look_up(embedding: nn.Module, table: WeightedTable, ids: Tensor) -> Tensor:
        dtype, scale = cast(Tensor, embedding.weight).dtype, scale_of_rows(embedding) or 1.0
        rows = functional.embedding(ids, table.left.to(ids.device)) @ table.right.to(ids.device)
        return (scale * rows).to(dtype)

    products: dict[nn.Module, Callable[..., Any]] = {}
    table = weighted.table
    if table is not None:
        embedding = token_embedding(model)[1]
        products[embedding] = partial(look_up, embedding, table)
    for name, rank in weighted.ranks.items():
        linear = model.base_model.get_submodule(name)
        measured = weighted.factors.get(name)
        factors: Callable[[], tuple[Tensor, Tensor, Tensor]]
        # Without a measurement the student takes its plain SVD, of a weight that is whole when the linear runs.
        factors = cache(partial(plain, linear, rank)) if measured is None else partial(leading, measured, rank)
        products[linear] = partial(multiply, linear, factors)
    return running_as(products)


def _judged_rows(tapped: TappedModel, batch: Batch, weighted: WeightedFactors) -> HeadInputs:
    """Return the rows that judge a model within `cut`, where a head that is tied to the token embedding is cut too."""
    table, heads = weighted.table, list[nn.Module]()
    if table is not None:
        name, _ = token_embedding(tapped.model)
        heads = [tapped.model.get_submodule(head) for head in tied_heads(tapped.model, name)]
    if table is None or not heads:
        return judged_rows(tapped, batch)[0]

    def multiply(head: nn.Module, inputs: Tensor) -> Tensor:
        right, left = (factor.to(inputs.device) for factor in (table.right, table.left))
        outputs = functional.linear(functional.linear(inputs.float(), right), left, cast("Tensor | None", head.bias))
        return outputs.to(inputs.dtype)

    # Where the shortcut reads the weight of the head, the head does not run.
    with running_as({} if tapped.shortcut else {head: partial(multiply, head) for head in heads}):
        head, _, _ = judged_rows(tapped, batch)
    if head.weight is None:
        return head
    right, left = (factor.to(head.weight) for factor in (table.right, table.left))
    return head._replace(rows=functional.linear(head.rows.to(right.dtype), right), weight=left)


def predict_losses(
    model: PreTrainedModel,
    factors: Mapping[str, WeightedSVD],
    batches: Sequence[Batch],
    sampling: Sampling = USUAL,
    *,
    reduce: Callable[[Tensor], object] | None = None,
) -> dict[str, Tensor]:
    """Return the predicted loss per token of lowering the rank of one linear alone, by its name in the base model.

    With the gradients g of sampled labels and the inputs x of a sequence's tokens this is half of (Σ gᵀ ΔW x)², summed
    over the sequences: the Fisher matrix of the weight itself. `WeightedSVD.costs` instead assumes that x and g are
    independent, which is wrong by a factor of 2 to 7 for gated feed-forward layers, and for queries and keys. One pass
    over the data gives the losses of all ranks, from 0 to the full one: (k + 1) in fp64 on the CPU.

    Args:
        model: the dense model, whose mode and weights stay as they are.
        factors: all factors of each matrix, up to its full rank, on every rank.
        batches: the batches of this rank, a sequence in each row, on any device.
        sampling: the labels, and what the linears read; with gradients.
        reduce: sums a tensor over the ranks in place.
    """
    # Factors go by names in the base model, measurements by those in the whole model.
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    names, make = [prefix + name for name in factors], partial(_LossSums, model, factors, prefix)
    passes = Passes(rounds=sampling.rounds, what="Measuring what each rank costs")
    sums = run_sampled(model, names, batches, make, sampling, passes)
    if reduce is not None:
        for tensor in (sums.tokens, *sums.losses.values()):
            reduce(tensor)
    return {name: (losses / sums.tokens).cpu() for name, losses in sums.losses.items()}


class _LossSums(HookSums):
    """Adds up the predicted loss of each rank in forward and backward hooks."""

    def __init__(
        self, model: PreTrainedModel, factors: Mapping[str, WeightedSVD], prefix: str, reads: Reads | None
    ) -> None:
        super().__init__(model.device)
        self._factors = held_at(factors, model.device)
        self._changed = frozenset() if reads is None else reads.changed
        self._moved: dict[str, Tensor] = {}
        """(B, k), how far each factor moves the loss of each sequence of the pass, over all calls of the linear."""
        self._call: list[tuple[Tensor, int]] = []
        """The first part of the running call, its inputs or the gradients at its outputs, with the tensor's version."""
        self.losses = {
            name: torch.zeros(len(svd.values) + 1, dtype=torch.float64, device=model.device)
            for name, svd in factors.items()
        }
        for name in factors:
            linear = model.base_model.get_submodule(name)
            self.handles += [
                linear.register_forward_pre_hook(partial(self._record_inputs, name, prefix + name)),
                linear.register_forward_hook(partial(self._record_gradients, name)),
            ]

    def _record_inputs(self, name: str, full_name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        if full_name in self._changed:  # overwritten in place before the gradients arrive
            x = x.clone()
        if self.phase == "recompute":
            self._pair(name, self.calls.popleft(), x, is_input=True)
            return
        self.check(name, x)
        self._call = [(x, version_of(x))] if self.phase == "store" else []
        # The second run of the layer takes the records of its first run from here, in the order of the calls.
        if self.phase == "drop":
            self.calls.append(self._call)

    def _record_gradients(self, name: str, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return hook_gradient(output, None if self.phase == "recompute" else partial(self._pair, name, self._call))

    def _pair(self, name: str, call: list[tuple[Tensor, int]], tensor: Tensor, *, is_input: bool = False) -> None:
        """Add up a call once it has both inputs and gradients; in a layer that runs again either may come first."""
        if not call:
            call.append((tensor, version_of(tensor)))
            return
        other, version = call.pop()
        if not self.is_known and version_of(other) != version:  # the model changed the inputs in place after the linear
            raise OddReadError(name)
        self._add(name, *((tensor, other) if is_input else (other, tensor)))

    @torch.no_grad()
    def _add(self, name: str, inputs: Tensor, gradients: Tensor) -> None:
        svd = self._factors[name].to(inputs.device)
        # (..., k): v_i x and gᵀ u_i of each token
        projected_inputs = functional.linear(inputs.float(), svd.right)
        projected_gradients = gradients.float() @ svd.left
        # In place, so that no third tensor of all tokens and factors is in memory.
        moved_Bk = self.sum_by_sequence(projected_inputs.mul_(projected_gradients)) * svd.values
        # gᵀ ΔW x = Σ_i (gᵀ u_i) σ_i (v_i x): all ranks follow from one number a factor and sequence.
        self._moved[name] = self._moved[name] + moved_Bk if name in self._moved else moved_Bk

    def finish(self) -> None:
        """Add up the squares of the sequences of a pass."""
        by_shape: dict[torch.Size, list[str]] = {}
        for name, moved_Bk in self._moved.items():
            by_shape.setdefault(moved_Bk.shape, []).append(name)
        for names in by_shape.values():
            moved_PBk = torch.stack([self._moved[name] for name in names]).double()
            # A cut to a rank loses all factors from this one on; the smallest are added first.
            lost_PBk = moved_PBk.flip(2).cumsum(2).flip(2)
            own = list((lost_PBk.square().sum(1) / 2).unbind())
            add_in_place([self.losses[name][:-1] for name in names], own)
        self._moved.clear()


@torch.no_grad()
def divergences(
    model: PreTrainedModel, cuts: Mapping[str, WeightedFactors], batches: Iterable[Batch]
) -> dict[str, float]:
    """Return how far each cut moves a model from itself: a mean over real tokens, or sequences of a classifier.

    It is KL(dense‖cut) of the logits in nats; for scores, and for the last hidden states of models without a head, half
    the squared distance.

    Args:
        model: the dense model, whose mode and weights stay as they are.
        cuts: the cuts by name.
        batches: the batches, on any device.
    """
    # On the device, which is asked once at the end.
    totals = {name: torch.zeros((), dtype=torch.float64, device=model.device) for name in cuts}
    cuts, count = {name: weighted.at(model.device) for name, weighted in cuts.items()}, 0
    with tapped_output(model) as tapped:
        for batch in progress(batches, "Held-out check", "batches"):
            moved = batch.with_positions(shift=tapped.shift).to(model.device)
            dense, classes, _ = judged_rows(tapped, moved)
            count += len(dense.rows)
            for name, weighted in cuts.items():
                with cut(model, weighted):
                    changed = _judged_rows(tapped, moved, weighted)
                if not classes:
                    totals[name] += (dense.rows - changed.rows).square().sum() / 2
                    continue
                labels_N = torch.zeros_like(dense.rows[:, 0], dtype=torch.long)  # which this term does not read
                with gathered(dense.weight, dense.bias):
                    divergence = token_losses(changed, dense, labels_N, [TokenTerm("", FORWARD_KL)], torch.ones(1))
                totals[name] += divergence.sums.sum()
    return {name: float(total) / max(count, 1) for name, total in totals.items()}
