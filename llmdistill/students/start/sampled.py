"""Runs a model backward from labels that are sampled from its own output (`measure_moments`), in little memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs
from llmdistill.errors import UserError
from llmdistill.internals.torch_names import version_of
from llmdistill.models.families import has_family, layers_of
from llmdistill.runtime.devices import give_back_memory
from llmdistill.step.forward import TappedModel
from llmdistill.step.passes import HookSums, OddReadError, Passes, are_nonzero, run_passes, split_batches
from llmdistill.step.taps import Recorder
from llmdistill.students.counting import count_parameters, layer_linears

# Chunks of 16 MB are no faster.
_CHUNK_BYTES = 1 << 22
"""Bytes of a chunk of logits in fp32, but at least a 32nd of the LM head's bytes, because each chunk reads the head."""
WITHOUT_GRADIENTS = ("reformer",)
"""Types of models through whose layers a gradient comes back in training mode alone."""
_FEW_TOKENS = 16
"""Tokens of the pass that shows what modules read; it keeps all their inputs in memory."""


@dataclass(frozen=True)
class Reads:
    """What modules read in a pass, as observed in a pass of a few tokens."""

    groups: list[list[str]]
    """The names of the modules; those of a group read the same tensors in all of their calls."""
    in_order: bool
    """Whether each call reads a row for each token of the batch, in the batch's order. If not, such as for relative
    positions, the tokens of an expert or axes in another order, padding and sequences can be told apart only in
    batches of one sequence without padding."""
    changed: frozenset[str]
    """The modules whose inputs the model changes in place after they were read."""

    def of(self, names: Collection[str]) -> Reads:
        """Return the same for some of the modules."""
        groups = [[name for name in group if name in names] for group in self.groups]
        return Reads([group for group in groups if group], self.in_order, self.changed)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a model is measured: on the labels that are sampled from its own output."""

    gradients: bool = True
    """Whether gradients are measured too, which takes a backward pass."""
    seed: int = 0
    """The seed of the labels."""
    reads: Reads | None = None
    """What the modules read, if it is known."""
    rounds: int = 0
    """The smallest number of passes; a rank with fewer batches repeats its own without counting them, because the ranks
    of a sharded model need each other in every pass."""


USUAL = Sampling()
"""Gradients of the labels of seed 0."""

_AnySums = TypeVar("_AnySums", bound=HookSums)


@torch.no_grad()
def watch_reads(model: PreTrainedModel, names: Collection[str], batches: Sequence[Batch]) -> Reads:
    """Observe what modules read in a forward pass over a few tokens of the first batch that has any.

    Its first and last sequence are the same, and the one between them is another one. This tells tensors of the
    batch's tokens from all others that happen to have as many rows.
    """
    batch = next((batch for batch in batches if batch.attention_mask.any()), None)
    if batch is None:
        return Reads([[name] for name in names], True, frozenset())
    lengths_B = (batch.attention_mask != 0).sum(1)
    row, length = int(lengths_B.argmax()), min(int(lengths_B.max()), _FEW_TOKENS)
    real_T = (batch.attention_mask[row] != 0).nonzero()[:length, 0]
    words_T = batch.input_ids[row, real_T]
    # Each id minus one, and 1 for 0: other tokens, which every vocabulary has.
    ids_3T = torch.stack([words_T, (words_T - 1).abs(), words_T])
    segments = None if batch.token_type_ids is None else batch.token_type_ids[row, real_T].expand(3, -1)
    probe = Batch(ids_3T, torch.ones_like(ids_3T), torch.full_like(ids_3T, IGNORE_INDEX), token_type_ids=segments)
    read: list[tuple[str, Tensor, tuple[object, ...]]] = []

    def record_input(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # The tensor is kept alive: an address that is freed may be that of another tensor in a later call.
        read.append((name, inputs[0], identity(inputs[0])))

    handles = [model.get_submodule(name).register_forward_pre_hook(partial(record_input, name)) for name in names]
    try:
        with tapped_output(model) as tapped:
            tapped(probe.with_positions(shift=tapped.shift).to(model.device))
    finally:
        for handle in handles:
            handle.remove()
    calls: dict[str, list[object]] = {}
    for name, _, key in read:
        calls.setdefault(name, []).append(key)
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, keys in calls.items():
        groups.setdefault(tuple(keys), []).append(name)
    is_in_order, are_equal = True, list[Tensor]()
    for _, tensor, _ in read:
        # It has the rows of the three sequences one after the other, of which the first and the last are equal, up to
        # rounding.
        axes = tensor.shape[:-1] if tensor.is_floating_point() else tensor.shape  # a token embedding reads ids
        is_in_order &= [size for size in axes if size > 1] in ([3, length], [3 * length])
        if is_in_order:
            first, other, same = tensor.reshape(3, -1).float()
            are_equal.append((first - same).norm() < (first - other).norm() / 10)
    is_in_order = is_in_order and all(are_nonzero(are_equal))
    return Reads(
        [*groups.values(), *([name] for name in names if name not in calls)],
        is_in_order,
        frozenset(name for name, tensor, key in read if identity(tensor) != key),
    )


def identity(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that every view that ZeRO-3's hooks make of a tensor shares, as long as the tensor is alive."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), version_of(tensor)


def run_sampled(
    model: PreTrainedModel,
    names: Collection[str],
    batches: Iterable[Batch],
    make: Callable[[Reads | None], _AnySums],
    sampling: Sampling,
    passes: Passes,
) -> _AnySums:
    """Run a model forward, and backward from sampled labels; return the sums of `make` (see `measure_moments`).

    Most models give each linear the tokens of the batch, once. If a pass meets anything else, it begins again with the
    observations of `watch_reads`, unless `sampling` has them already.
    """
    batches, gradients = list(batches), sampling.gradients
    limit, layers = tokens_at_a_time(model), list(layers_of(model))

    def step(tapped: TappedModel, sums: HookSums, batch: Batch) -> None:
        # The share of the layers that may keep their graph is limit / tokens; the first layers drop theirs.
        dropped = max(0, math.ceil(len(layers) * (1 - limit / batch.input_ids.numel()))) if gradients else len(layers)
        again = layers[:dropped] if gradients else []
        # Memory that a layer frees lies between the tensors that it keeps; returned at once, it does not fragment.
        kept = layers[dropped:] if model.device.type == "cpu" else []  # a GPU's memory is not the heap's
        handles = [layer.register_forward_hook(lambda *_: give_back_memory()) for layer in kept]
        try:
            with torch.set_grad_enabled(gradients), _recomputing(again, sums):
                loss = _make_sampled_loss(tapped, batch, sampling.seed, sums.add_probabilities)
                if gradients and (model.config.model_type in WITHOUT_GRADIENTS or not loss.requires_grad):
                    raise UserError(
                        f"no gradient comes back through the layers of {type(model).__name__} outside of training: set "
                        "weighting to activations, and allocation to uniform"
                    )
                if gradients:
                    loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        if model.device.type == "cpu":
            give_back_memory()

    def run_all(reads: Reads | None) -> _AnySums:
        sums = make(reads)
        sums.is_known = reads is not None
        parts = batches if reads is None or reads.in_order else split_batches(batches, 1)
        with tapped_output(model) as tapped:
            run_passes(model, parts, sums, partial(step, tapped, sums), passes)
        return sums

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # saves the memory and time of weight gradients, which nobody reads
    try:
        if sampling.reads is None and not passes.done:
            with suppress(OddReadError):
                return run_all(None)
        return run_all(watch_reads(model, names, batches) if sampling.reads is None else sampling.reads)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        give_back_memory()


def graph_tokens(model: PreTrainedModel) -> int:
    """Return the number of tokens whose tensors for the backward pass take at most an eighth of the model's fp32 bytes.

    A layer keeps about twice the outputs of its linears; a Llama keeps 1.6 times as much.
    """
    # A quarter of the model's bytes was over the aim for the peak.
    # Tokens times values times itemsize are at most 4 bytes times parameters / 8.
    return max(1, count_parameters(model) // (2 * _graph_values(model) * model.dtype.itemsize))


def tokens_at_a_time(model: PreTrainedModel) -> int:
    """Return `graph_tokens`, or on a GPU as many as a quarter of its free memory holds: small batches leave it idle.

    The rest is for the moments and for what a backward pass takes beside its graph.
    """
    fewest = graph_tokens(model)
    if model.device.type != "cuda":
        return fewest
    free, _ = torch.cuda.mem_get_info(model.device)
    return max(fewest, free // 4 // (_graph_values(model) * model.dtype.itemsize))


def _graph_values(model: PreTrainedModel) -> int:
    """Return about how many numbers a token leaves in the graph of a backward pass."""
    return 2 * sum(m for m, _ in layer_linears(model).values())


@contextmanager
def _recomputing(layers: Sequence[nn.Module], sums: HookSums) -> Iterator[None]:
    """Within this block, layers keep only their inputs for the backward pass, which computes the rest again."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        calls = deque[Any]()
        return sums.during("drop", calls), sums.during("recompute", calls)

    def recompute(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            # Running again, it would find its own keys in the cache (FlauBERT always has one).
            if any(isinstance(value, Cache) for value in (*args, *more.values())):
                return forward(*args, **more)
            # In evaluation mode nothing is drawn, so there is no state of a generator to restore.
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **more
            )

        return run

    with running_as({layer: recompute(layer.forward) for layer in layers}):
        yield


@contextmanager
def running_as(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within this block, modules run these functions, with the hooks around their calls."""
    # An instance may have a forward of its own already, such as one that accelerate or a compiler has put there.
    own = {module: vars(module).get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, before in own.items():
            del module.forward
            if before is not None:
                module.forward = before


@contextmanager
def tapped_output(model: PreTrainedModel) -> Iterator[TappedModel]:
    """Yield the forward pass of a model in evaluation mode with all that `judged_rows` needs.

    A model that ZeRO-3 shards is called itself, not its engine, which refuses any backward pass but its own; the hooks
    that gather the parameters are on the modules.
    """
    training = model.training
    # Without a head a model is judged by its hidden states; only a family says that a layer returns those of tokens.
    is_tapped = model.base_model is model and has_family(model.config)
    hidden = frozenset({len(layers_of(model)) - 1} if is_tapped else ())
    tapped = TappedModel(model.eval(), Recorder(model, {"hidden": hidden}, recomputes=True))
    try:
        yield tapped
    finally:
        tapped.remove()
        if training:
            model.train()


def judged_rows(tapped: TappedModel, batch: Batch) -> tuple[HeadInputs, bool, bool]:
    """Run a model; return the rows (N, K) that judge it, whether they give logits, and whether each row is a token.

    These are the inputs of an LM head, with its weight, so that the logits can be computed in chunks; else the logits
    of sequences, or the hidden states, in fp32. A sequence with several distributions, such as those of start and end,
    has a row for each, side by side.
    """
    model, returned = tapped.model, list[Tensor]()
    batch = batch.with_positions(shift=tapped.shift)
    has_head = model.base_model is not model
    handle = model.register_forward_hook(lambda *call: None if has_head else returned.append(call[-1][0]))
    try:
        outputs = tapped.compute_targets(batch, lm_head=("tokens",))
    finally:
        handle.remove()
    if outputs.lm_head:
        return cast(HeadInputs, outputs.lm_head["tokens"]), True, True
    if outputs.sequence_logits is not None:
        rows_NK = outputs.sequence_logits.float().flatten(0, -2)
        return HeadInputs(rows_NK, None, None), outputs.sequence_logits.shape[-1] > 1, False
    (hidden_BTW,) = outputs.taps.hidden.values() or returned
    rows_NW = hidden_BTW.flatten(0, 1).index_select(0, batch.flat_positions("tokens"))
    return HeadInputs(rows_NW.float(), None, None), False, True


def _make_sampled_loss(tapped: TappedModel, batch: Batch, seed: int, seen: Callable[[Tensor], object]) -> Tensor:
    """Run a model; return a sum with the gradients of the negative log-likelihood of labels sampled from its output.

    `seen` gets the probabilities (n, V), some rows at a time, if each row has classes.
    """
    batch = batch.with_positions(shift=tapped.shift)

    def loss(head: HeadInputs, classes: bool = True, tokens: bool = True) -> Tensor:
        chances_BTK = draw_uniform(batch, 1 if classes else head.rows.shape[1], seed)
        per_sequence = len(head.rows) // len(chances_BTK)  # the distributions of a sequence: two for a span
        chances_NK = (chances_BTK if tokens else chances_BTK[:, :per_sequence]).flatten(0, 1)
        if tokens:
            chances_NK = chances_NK.index_select(0, batch.flat_positions("tokens"))
        if not torch.is_grad_enabled():
            return head.rows
        if classes:
            return (head.rows * _compute_gradients(head, chances_NK[:, 0], seen)).sum()
        # A normal distribution of variance 1 around each value has the same Fisher matrix as random signs.
        return (head.rows * torch.where(chances_NK < 0.5, -1.0, 1.0)).sum()

    if tapped.shortcut and tapped.has_lm_head:
        total = tapped.run_through_head(batch, loss, "tokens")
        assert total is not None
        return total
    return loss(*judged_rows(tapped, batch))


@torch.no_grad()
def _compute_gradients(head: HeadInputs, chances_N: Tensor, seen: Callable[[Tensor], object]) -> Tensor:
    """Return the gradients (N, K) at the rows of the negative log-likelihood of a class sampled for each row.

    The logits are computed in chunks. `chances_N` are uniform from 0 to 1.
    """
    gradients_NK = torch.empty_like(head.rows)
    w_VK = head.weight
    vocabulary = head.rows.shape[1] if w_VK is None else len(w_VK)
    size = max(_CHUNK_BYTES, 0 if w_VK is None else w_VK.nbytes // 32)
    count = max(1, size // (4 * vocabulary))  # rows of logits in fp32
    for start in range(0, len(head.rows), count):
        here = slice(start, start + count)
        rows = head.rows[here]
        outputs = rows.clone() if w_VK is None else functional.linear(rows.to(w_VK.dtype), w_VK, head.bias)
        p_NV = head.scale.apply_(outputs.float())  # changed in place from here on: a chunk is in memory once
        slope = head.scale.slope(p_NV)
        p_NV.sub_(p_NV.amax(-1, keepdim=True)).exp_()
        p_NV /= p_NV.sum(-1, keepdim=True)
        seen(p_NV)
        # The gradient of -log p at the logits is p minus one at the class, so that no graph of the logits is needed.
        # The class is that in whose share of the line from 0 to 1 the random number lies. The line ends at the last
        # sum, which fp32 rounds to something near 1: a number above it would have no class.
        ends_NV = p_NV.cumsum(dim=-1)
        target = torch.searchsorted(ends_NV, (chances_N[here] * ends_NV[:, -1])[:, None]).clamp_(max=vocabulary - 1)
        p_NV.scatter_add_(1, target, p_NV.new_full((), -1.0).expand(target.shape))
        if not head.scale.is_plain:
            p_NV.mul_(slope)
        gradients_NK[here] = p_NV if w_VK is None else p_NV.to(w_VK.dtype) @ w_VK
    return gradients_NK


def draw_uniform(batch: Batch, width: int, seed: int) -> Tensor:
    """Draw uniform random numbers (B, T, width) for each token; they follow from the seed and the id of its row."""
    rows, length = batch.input_ids.shape
    # Without ids a sequence is known only by its place in the batch.
    ids: Sequence[Any] = batch.sample_ids or [(row,) for row in range(rows)]
    numbers = []
    for sample_id in ids:
        # The multiplier (2^64 by the golden ratio) keeps the seeds of neighboring runs and samples apart.
        generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + int(sample_id[0])) % 2**63)
        # On the CPU, whose numbers do not depend on the device of the model
        numbers.append(torch.rand(length, width, generator=generator))
    return cast(Tensor, torch.stack(numbers)).to(batch.input_ids.device, non_blocking=True)
