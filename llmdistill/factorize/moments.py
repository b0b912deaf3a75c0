"""Measures what the linears of a model read and how much the loss depends on what they return.

For each linear these are the second moments C = Σ x xᵀ of its inputs and G = Σ g gᵀ of the gradients at its outputs,
summed over tokens. C ⊗ G / tokens is the Kronecker-factored Fisher matrix of the linear's weight (K-FAC), so that a
change ΔW costs about Σ tr(ΔWᵀ G ΔW C) / (2 tokens) of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch, Outputs
from llmdistill.models.families import layers_of
from llmdistill.models.forward import TappedModel
from llmdistill.models.passes import HookSums, run_passes
from llmdistill.models.taps import Recorder


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The second moments of one linear, summed over tokens."""

    inputs: Tensor
    """(n, n), Σ x xᵀ; linears that read the same tensor share it."""
    gradients: Tensor | None
    """(m, m), Σ g gᵀ; None if no gradients were measured."""
    tokens: int
    """The number of tokens."""


def measure_moments(
    model: PreTrainedModel,
    names: Collection[str],
    batches: Iterable[Batch],
    *,
    gradients: bool = True,
    seed: int = 0,
    reduce: Callable[[Tensor, str | None], bool] | None = None,
    rounds: int = 0,
) -> dict[str, Moments]:
    """Return the second moments of some linears over the real tokens of batches, in fp32 whatever the model's dtype.

    The gradients are those of the log-likelihood of labels that are sampled from the model's own output, so they
    measure the true Fisher matrix: for a language model one label at each token, for a classifier one class for each
    sequence. A model without a head uses random signs on its last hidden states (the Gauss-Newton matrix). The random
    numbers of a sample follow from its id, so they do not depend on ranks and batches.

    Args:
        model: the model, whose mode and weights stay as they are.
        names: names of nn.Linear or Conv1D modules in the model.
        batches: the batches of this rank, on any device; each rank needs at least one.
        gradients: whether G is measured; C alone needs no backward pass.
        seed: the seed of the labels.
        reduce: sums a tensor of the linear with this name over the ranks, in place, and returns whether this rank needs
            the sum; only its moments are then returned. The number of tokens, without a name, is needed by every rank.
        rounds: the smallest number of passes; a rank with fewer batches repeats its own without counting them, because
            the ranks of a sharded model need each other in every pass.

    Raises:
        UserError: there is no token, or a moment is not finite.
    """
    sums = _Sums(model, names, gradients)
    run_sampled(model, batches, sums, gradients=gradients, seed=seed, rounds=rounds)
    return sums.moments(reduce)


def run_sampled(
    model: PreTrainedModel, batches: Iterable[Batch], sums: HookSums, *, gradients: bool, seed: int, rounds: int
) -> None:
    """Run a model forward, and backward from sampled labels, while `sums` counts; see `measure_moments`."""
    tapped = tapped_output(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # the gradients of the weights are not needed

    def step(batch: Batch) -> None:
        with torch.set_grad_enabled(gradients):
            outputs = tapped(batch)
            if gradients:
                _sampled_loss(outputs, batch, seed).backward()

    try:
        run_passes(model, batches, sums, step, rounds=rounds)
    finally:
        tapped.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


@torch.no_grad()
def shared_inputs(model: PreTrainedModel, names: Collection[str], batch: Batch) -> list[list[str]]:
    """Group linears that read the same tensor, such as queries, keys and values, by a forward pass on one sequence."""
    read: dict[tuple[object, ...], tuple[Tensor, list[str]]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
            read.setdefault(_identity(inputs[0]), (inputs[0], []))[1].append(name)

        return note

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    training = model.training
    tapped = tapped_output(model.eval())
    try:
        tapped(_first_row(batch).to(model.device))
    finally:
        tapped.remove()
        model.train(training)
        for handle in handles:
            handle.remove()
    groups = [group for _, group in read.values()]
    found = set(chain.from_iterable(groups))
    return [*groups, *([name] for name in names if name not in found)]


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """A key that is the same for every view that ZeRO-3's hooks make of a tensor, as long as the tensor is kept."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version


def _first_row(batch: Batch) -> Batch:
    values = ((each.name, getattr(batch, each.name)) for each in fields(batch))
    first: dict[str, Any] = {key: value[:1] for key, value in values if isinstance(value, Tensor | tuple)}
    return replace(batch, **first)


class _Sums(HookSums):
    """Adds up the moments of linears in forward and backward hooks."""

    def __init__(self, model: PreTrainedModel, names: Collection[str], gradients: bool) -> None:
        super().__init__(model.device)
        self._read: dict[tuple[object, ...], tuple[str, Tensor]] = {}
        self._inputs: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._source: dict[str, str] = {}
        """The linear that first read the tensor that a linear reads."""
        self.handles = [model.get_submodule(name).register_forward_hook(self._hook(name, gradients)) for name in names]

    @contextmanager
    def counting(self, mask_BT: Tensor) -> Iterator[None]:
        """Add up the moments of one pass; the tensors that linears read are told apart for as long as it lasts."""
        with super().counting(mask_BT):
            yield
        self._read = {}

    def moments(self, reduce: Callable[[Tensor, str | None], bool] | None) -> dict[str, Moments]:
        """Return the sums over all ranks that this rank needs."""
        if reduce is not None:
            reduce(self.tokens, None)
            for sums in (self._inputs, self._gradients):
                needed = {name: reduce(each, name) for name, each in sums.items()}
                for name in (name for name, mine in needed.items() if not mine):
                    del sums[name]
        measured = chain(self._inputs.items(), self._gradients.items())
        tokens = self.counted((f"the inputs or gradients of {name}", each) for name, each in measured)
        return {
            name: Moments(inputs=self._inputs[source], gradients=self._gradients.get(name), tokens=tokens)
            for name, source in self._source.items()
            if source in self._inputs
        }

    def _hook(self, name: str, gradients: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            first, _kept = self._read.setdefault(_identity(inputs[0]), (name, inputs[0]))
            self._source.setdefault(name, first)
            if first == name:
                _add(self._inputs, name, inputs[0].detach()[self.mask])
            if gradients:
                # The graph begins at the first linear that is measured, as no weight requires a gradient: what is below
                # takes no part in the backward pass.
                output.requires_grad_(True).register_hook(
                    lambda gradient: _add(self._gradients, name, gradient.detach()[self.mask])
                )

        return hook


def _add(sums: dict[str, Tensor], name: str, rows_NK: Tensor) -> None:
    rows = rows_NK.float()
    if name not in sums:
        sums[name] = rows.new_zeros(rows.shape[1], rows.shape[1])
    sums[name].addmm_(rows.T, rows)


def tapped_output(model: PreTrainedModel) -> TappedModel:
    """Return the forward pass of a model that gives what `judged_rows` needs; call its `remove` at the end.

    A model that ZeRO-3 shards is called itself, not its engine, which refuses any backward pass but its own; the hooks
    that gather the parameters are on the modules.
    """
    last = len(layers_of(model)) - 1
    return TappedModel(model, Recorder(model, {"hidden": frozenset({last})}))


def judged_rows(outputs: Outputs, batch: Batch) -> tuple[Tensor, bool, bool]:
    """Return what a model is judged by in fp32, (N, K), whether these are logits, and whether each row is a token.

    Of a sequence with several distributions, such as those of start and end, each is a row; they are side by side.
    """
    mask_BT = batch.attention_mask != 0
    if outputs.logits is not None:
        return outputs.logits[mask_BT].float(), True, True
    if outputs.sequence_logits is not None:
        return outputs.sequence_logits.float().flatten(0, -2), outputs.sequence_logits.shape[-1] > 1, False
    (hidden_BTW,) = outputs.taps.hidden.values()
    return hidden_BTW[mask_BT].float(), False, True


def _sampled_loss(outputs: Outputs, batch: Batch, seed: int) -> Tensor:
    """The negative log-likelihood of labels sampled from the outputs, summed over the batch."""
    rows_NK, classes, tokens = judged_rows(outputs, batch)
    chances_BTK = _uniform(batch, 1 if classes else rows_NK.shape[1], seed)
    each = len(rows_NK) // len(chances_BTK)  # the distributions of a sequence: two for a span
    chances_NK = chances_BTK[batch.attention_mask != 0] if tokens else chances_BTK[:, :each].flatten(0, 1)
    if classes:
        return _sampled_nll(rows_NK, chances_NK[:, 0])
    # A normal distribution of variance 1 around each value has the same Fisher matrix as random signs.
    return (rows_NK * torch.where(chances_NK < 0.5, -1.0, 1.0)).sum()


def _sampled_nll(logits_NV: Tensor, chances_N: Tensor) -> Tensor:
    """The negative log-likelihood of one sampled class per row; `chances_N` are uniform from 0 to 1."""
    log_NV = torch.log_softmax(logits_NV.float(), dim=-1)
    cumulated = log_NV.detach().exp().cumsum(dim=-1)
    target = torch.searchsorted(cumulated, (chances_N * cumulated[:, -1])[:, None]).clamp(max=logits_NV.shape[1] - 1)
    return -log_NV.gather(1, target).sum()


def _uniform(batch: Batch, width: int, seed: int) -> Tensor:
    """Uniform random numbers (B, T, width) for each token, which follow from the seed and the id of its row."""
    rows, length = batch.input_ids.shape
    ids: Sequence[Any] = batch.sample_ids or [(row,) for row in range(rows)]
    drawn = []
    for each in ids:
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + int(each[0])) % 2**63)
        drawn.append(torch.rand(length, width, generator=generator))
    return cast(Tensor, torch.stack(drawn)).to(batch.input_ids.device)
