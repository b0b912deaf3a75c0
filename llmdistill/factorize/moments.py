"""Measures what the linears of a model read and how much the loss depends on what they return.

For each linear these are the second moments C = Σ x xᵀ of its inputs and G = Σ g gᵀ of the gradients at its outputs,
summed over tokens. C ⊗ G / tokens is the Kronecker-factored Fisher matrix of the linear's weight (K-FAC), so that a
change ΔW costs about Σ tr(ΔWᵀ G ΔW C) / (2 tokens) of the loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from llmdistill.batch import Batch, HeadInputs, Outputs
from llmdistill.factorize.counting import count_parameters, layer_linears
from llmdistill.models.families import layers_of
from llmdistill.models.forward import TappedModel
from llmdistill.models.passes import HookSums, rows_of, run_passes
from llmdistill.models.taps import Recorder
from llmdistill.runtime.devices import give_back_memory

_CHUNK_BYTES = 1 << 24
"""Bytes of the logits in fp32 that are there at a time."""
_FEW_TOKENS = 16
"""As many show which linears read the same tensor; all that is read is kept for that."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The second moments of one linear, summed over tokens."""

    inputs: Tensor
    """(n, n), Σ x xᵀ; linears that read the same tensor share it."""
    gradients: Tensor | None
    """(m, m), Σ g gᵀ; None if no gradients were measured."""
    tokens: int
    """The number of tokens."""


@dataclass(frozen=True)
class Begun:
    """The state of a measurement: what was summed up so far."""

    done: int = 0
    """The number of passes."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """The number of tokens, and the lower triangles of the moments, by keys such as "inputs NAME"."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The linear that first reads the tensor that a linear reads."""


def measure_moments(
    model: PreTrainedModel,
    names: Collection[str],
    batches: Iterable[Batch],
    *,
    gradients: bool = True,
    seed: int = 0,
    reduce: Callable[[Tensor, str | None], bool] | None = None,
    rounds: int = 0,
    resumed: Begun | None = None,
    after: Callable[[int, int, Callable[[], Begun]], object] = lambda done, total, begun: None,
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
        resumed: the sums of an earlier call with the same arguments that was interrupted.
        after: is called after each pass with the number of passes that are done, the number of all, and a function
            that returns what `resumed` takes.

    Raises:
        UserError: there is no token, or a moment is not finite.
    """
    resumed = resumed or Begun()
    sums = _Sums(model, names, gradients, resumed)
    run_sampled(
        model,
        batches,
        sums,
        gradients=gradients,
        seed=seed,
        rounds=rounds,
        done=resumed.done,
        after=lambda done, total: after(done, total, lambda: sums.begun(done)),
    )
    return sums.moments(reduce)


def run_sampled(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    sums: HookSums,
    *,
    gradients: bool,
    seed: int,
    rounds: int,
    what: str = "Calibrating",
    done: int = 0,
    after: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Run a model forward, and backward from sampled labels, while `sums` counts; see `measure_moments`."""
    tapped = tapped_output(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # the gradients of the weights are not needed
    limit, layers = graph_tokens(model), list(layers_of(model))

    def step(batch: Batch) -> None:
        dropped = math.ceil(len(layers) * (1 - limit / batch.input_ids.numel())) if gradients else 0
        with torch.set_grad_enabled(gradients), _dropping(layers[: max(0, dropped)], sums):
            loss = _sampled_loss(tapped, batch, seed, sums.judged)
            if gradients:
                loss.backward()
        give_back_memory()

    try:
        run_passes(model, batches, sums, step, rounds=rounds, what=what, done=done, after=after)
    finally:
        tapped.remove()
        for parameter in trained:
            parameter.requires_grad_(True)
        give_back_memory()


def graph_tokens(model: PreTrainedModel) -> int:
    """The number of tokens whose tensors for the backward pass take a third of the memory of the model in fp32 at most.

    What a layer keeps is about twice what its linears return; a Llama keeps 1.6 times as much.
    """
    kept = 2 * sum(m for m, _ in layer_linears(model).values())
    return max(1, 4 * count_parameters(model) // (3 * kept * model.dtype.itemsize))


@contextmanager
def _dropping(layers: Sequence[nn.Module], sums: HookSums) -> Iterator[None]:
    """Block in which layers keep only their inputs for the backward pass, which computes the rest again."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return sums.during("dropped"), sums.during("again")

    def dropping(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **more
            )

        return run

    own = [vars(layer).get("forward") for layer in layers]
    for layer in layers:  # on the instance, so that the hooks around the call remain
        layer.forward = dropping(layer.forward)
    try:
        yield
    finally:
        for layer, before in zip(layers, own, strict=True):
            del layer.forward
            if before is not None:
                layer.forward = before


@torch.no_grad()
def shared_inputs(model: PreTrainedModel, names: Collection[str], batch: Batch) -> list[list[str]]:
    """Group linears that read the same tensor, such as queries, keys and values, by a forward pass on a few tokens."""
    read: dict[tuple[object, ...], tuple[Tensor, list[str]]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
            read.setdefault(_identity(inputs[0]), (inputs[0], []))[1].append(name)

        return note

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    training = model.training
    tapped = tapped_output(model.eval())
    try:
        tapped(rows_of(batch, slice(0, 1), _FEW_TOKENS).to(model.device))
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


class _Sums(HookSums):
    """Adds up the moments of linears in forward and backward hooks."""

    def __init__(self, model: PreTrainedModel, names: Collection[str], gradients: bool, begun: Begun) -> None:
        super().__init__(model.device)
        self._read: deque[tuple[Tensor, str]] = deque(maxlen=2)
        """The last tensors that linears read, each with the linear that read it first: no more are kept alive."""
        known = {key: each.to(model.device) for key, each in begun.sums.items()}
        self.tokens = known.pop("tokens", self.tokens)
        self._inputs, self._gradients = (
            {key.partition(" ")[2]: each for key, each in known.items() if key.startswith(what)}
            for what in ("inputs", "gradients" if gradients else "none")
        )
        self._source = dict(begun.sources)
        """The linear that first read the tensor that a linear reads."""
        self.handles = [model.get_submodule(name).register_forward_hook(self._hook(name, gradients)) for name in names]

    def begun(self, done: int) -> Begun:
        """Return what was summed up so far."""
        both = (("inputs", self._inputs), ("gradients", self._gradients))
        sums = {f"{what} {name}": each for what, of in both for name, each in of.items()}
        return Begun(done, {"tokens": self.tokens, **sums}, self._source)

    def moments(self, reduce: Callable[[Tensor, str | None], bool] | None) -> dict[str, Moments]:
        """Return the sums over all ranks that this rank needs."""
        if reduce is not None:
            reduce(self.tokens, None)
            for sums in (self._inputs, self._gradients):
                needed = {name: reduce(each, name) for name, each in sums.items()}
                for name in (name for name, mine in needed.items() if not mine):
                    del sums[name]
        measured = chain(self._inputs.items(), self._gradients.items())
        tokens = self.counted((f"the inputs or gradients of {name}", _whole(each)) for name, each in measured)
        return {
            name: Moments(inputs=self._inputs[source], gradients=self._gradients.get(name), tokens=tokens)
            for name, source in self._source.items()
            if source in self._inputs
        }

    def _hook(self, name: str, gradients: bool) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self.phase != "again":
                self._add_inputs(name, inputs[0])
            if gradients:
                # The graph begins at the first linear that is measured, as no weight requires a gradient: what is below
                # takes no part in the backward pass.
                output.requires_grad_(True)
                if self.phase != "again":
                    output.register_hook(lambda each: _add(self._gradients, name, self.rows(each)))

        return hook

    def _add_inputs(self, name: str, inputs: Tensor) -> None:
        first = next((first for each, first in self._read if _identity(each) == _identity(inputs)), None)
        if first is None:
            first = name
            self._read.append((inputs.detach(), name))  # the graph would hold this object through its hooks
            _add(self._inputs, name, self.rows(inputs))
        self._source.setdefault(name, first)


BLOCK = 256
"""Rows of a moment that are added up at a time, each up to its diagonal: the other half is the same."""


def _add(sums: dict[str, Tensor], name: str, rows_NK: Tensor) -> None:
    """Add Σ x xᵀ to the lower triangle; `_whole` copies it to the upper one."""
    rows = rows_NK.float()
    width = rows.shape[1]
    if name not in sums:
        sums[name] = rows.new_zeros(width, width)
    for end in range(BLOCK, width + BLOCK, BLOCK):
        here = slice(end - BLOCK, end)
        sums[name][here, :end].addmm_(rows[:, here].T, rows[:, :end])


def _whole(lower: Tensor) -> Tensor:
    """Fill in the upper triangle of a symmetric matrix, in place."""
    for start in range(0, len(lower), BLOCK):
        here, below = slice(start, start + BLOCK), slice(start + BLOCK, None)
        lower[here, below] = lower[below, here].T
    return lower


def tapped_output(model: PreTrainedModel) -> TappedModel:
    """Return the forward pass of a model that gives what `judged_rows` needs; call its `remove` at the end.

    A model that ZeRO-3 shards is called itself, not its engine, which refuses any backward pass but its own; the hooks
    that gather the parameters are on the modules.
    """
    last = len(layers_of(model)) - 1
    return TappedModel(model, Recorder(model, {"hidden": frozenset({last})}))


def judged(tapped: TappedModel, batch: Batch) -> Outputs:
    """Run a model and return what it is judged by: the inputs of an LM head, the logits of sequences, hidden states."""
    return tapped.teach(batch, lm_head=("tokens",))


def judged_rows(outputs: Outputs, batch: Batch) -> tuple[HeadInputs, bool, bool]:
    """Return what a model is judged by in fp32, (N, K), whether these are logits, and whether each row is a token.

    The rows of an LM head come with its weight, so that the logits can be computed in chunks. Of a sequence with
    several distributions, such as those of start and end, each is a row; they are side by side.
    """
    if outputs.lm_head:
        return cast(HeadInputs, outputs.lm_head["tokens"]), True, True
    if outputs.sequence_logits is not None:
        rows_NK = outputs.sequence_logits.float().flatten(0, -2)
        return HeadInputs(rows_NK, None, None), outputs.sequence_logits.shape[-1] > 1, False
    (hidden_BTW,) = outputs.taps.hidden.values()
    return HeadInputs(hidden_BTW[batch.attention_mask != 0].float(), None, None), False, True


def _sampled_loss(tapped: TappedModel, batch: Batch, seed: int, seen: Callable[[Tensor], object]) -> Tensor:
    """Run a model; return a sum with the gradients of the negative log-likelihood of labels sampled from its output.

    `seen` gets the probabilities (n, V) of some rows after the other, if each row has classes.
    """

    def loss(head: HeadInputs, classes: bool = True, tokens: bool = True) -> Tensor:
        chances_BTK = _uniform(batch, 1 if classes else head.rows.shape[1], seed)
        each = len(head.rows) // len(chances_BTK)  # the distributions of a sequence: two for a span
        chances_NK = chances_BTK[batch.attention_mask != 0] if tokens else chances_BTK[:, :each].flatten(0, 1)
        if not torch.is_grad_enabled():
            return head.rows
        give_back_memory()  # what the layers have freed lies between what they keep
        if classes:
            return (head.rows * _sampled_gradients(head, chances_NK[:, 0], seen)).sum()
        # A normal distribution of variance 1 around each value has the same Fisher matrix as random signs.
        return (head.rows * torch.where(chances_NK < 0.5, -1.0, 1.0)).sum()

    if tapped.shortcut and tapped.has_lm_head:
        total = tapped.through_head(batch, loss, "tokens")
        assert total is not None
        return total
    return loss(*judged_rows(judged(tapped, batch), batch))


@torch.no_grad()
def _sampled_gradients(head: HeadInputs, chances_N: Tensor, seen: Callable[[Tensor], object]) -> Tensor:
    """The gradients (N, K) at the rows of the negative log-likelihood of one class per row, sampled from its output.

    The logits are there in chunks. `chances_N` are uniform from 0 to 1.
    """
    gradients_NK = torch.empty_like(head.rows)
    w_VK = head.weight
    words = head.rows.shape[1] if w_VK is None else len(w_VK)
    count = max(1, _CHUNK_BYTES // (4 * words))
    for start in range(0, len(head.rows), count):
        here = slice(start, start + count)
        rows = head.rows[here]
        logits = rows.clone() if w_VK is None else functional.linear(rows.to(w_VK.dtype), w_VK, head.bias)
        p_NV = logits.float()
        p_NV.sub_(p_NV.amax(-1, keepdim=True)).exp_()
        p_NV /= p_NV.sum(-1, keepdim=True)
        seen(p_NV)
        target = _sampled(p_NV, chances_N[here])
        p_NV.scatter_add_(1, target, p_NV.new_full((), -1.0).expand(target.shape))
        gradients_NK[here] = p_NV if w_VK is None else p_NV.to(w_VK.dtype) @ w_VK
    return gradients_NK


def _sampled(p_NV: Tensor, chances_N: Tensor) -> Tensor:
    """One class (N, 1) of each row, by uniform random numbers from 0 to 1."""
    cumulated = p_NV.cumsum(dim=-1)
    return torch.searchsorted(cumulated, (chances_N * cumulated[:, -1])[:, None]).clamp_(max=p_NV.shape[1] - 1)


def _uniform(batch: Batch, width: int, seed: int) -> Tensor:
    """Uniform random numbers (B, T, width) for each token, which follow from the seed and the id of its row."""
    rows, length = batch.input_ids.shape
    ids: Sequence[Any] = batch.sample_ids or [(row,) for row in range(rows)]
    drawn = []
    for each in ids:
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + int(each[0])) % 2**63)
        drawn.append(torch.rand(length, width, generator=generator))
    return cast(Tensor, torch.stack(drawn)).to(batch.input_ids.device)
