"""Runs a model backward from labels that are sampled from its own output (`measure_moments`), in little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from llmdistill.batch import Batch, HeadInputs
from llmdistill.factorize.counting import count_parameters, layer_linears
from llmdistill.models.families import layers_of
from llmdistill.models.forward import TappedModel
from llmdistill.models.passes import HookSums, run_passes
from llmdistill.models.taps import Recorder
from llmdistill.runtime.devices import give_back_memory

_CHUNK_BYTES = 1 << 22
"""Bytes of the logits in fp32 that are there at a time; or a 32nd of the LM head's, which each chunk reads, if more."""


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
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)  # the gradients of the weights are not needed
    limit, layers = graph_tokens(model), list(layers_of(model))

    def step(batch: Batch) -> None:
        dropped = max(0, math.ceil(len(layers) * (1 - limit / batch.input_ids.numel()))) if gradients else len(layers)
        again = layers[:dropped] if gradients else []
        with torch.set_grad_enabled(gradients), _dropping(again, sums), _trimming(layers[dropped:]):
            loss = _sampled_loss(tapped, batch, seed, sums.judged)
            if gradients:
                loss.backward()
        give_back_memory()

    try:
        with tapped_output(model) as tapped:
            run_passes(model, batches, sums, step, rounds=rounds, what=what, done=done, after=after)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        give_back_memory()


def graph_tokens(model: PreTrainedModel) -> int:
    """The number of tokens whose tensors for the backward pass take at most an eighth of the model's memory in fp32.

    What a layer keeps is about twice what its linears return; a Llama keeps 1.6 times as much.
    """
    kept = 2 * sum(m for m, _ in layer_linears(model).values())
    return max(1, count_parameters(model) // (2 * kept * model.dtype.itemsize))


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

    with running_as({layer: dropping(layer.forward) for layer in layers}):
        yield


@contextmanager
def running_as(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Block in which modules run these functions, with the hooks around their calls."""
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
def _trimming(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Block in which layers give back what they have freed, which lies between the tensors that they keep."""
    handles = [layer.register_forward_hook(lambda *_: give_back_memory()) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def tapped_output(model: PreTrainedModel) -> Iterator[TappedModel]:
    """Block with the forward pass of a model in evaluation mode that gives what `judged_rows` needs.

    A model that ZeRO-3 shards is called itself, not its engine, which refuses any backward pass but its own; the hooks
    that gather the parameters are on the modules.
    """
    training, last = model.training, len(layers_of(model)) - 1
    tapped = TappedModel(model.eval(), Recorder(model, {"hidden": frozenset({last})}))
    try:
        yield tapped
    finally:
        tapped.remove()
        model.train(training)


def judged_rows(tapped: TappedModel, batch: Batch) -> tuple[HeadInputs, bool, bool]:
    """Run a model; return what it is judged by, (N, K), whether these are logits, and whether each row is a token.

    It is judged by the inputs of an LM head, which come with its weight, so that the logits can be computed in chunks;
    else by the logits of sequences, or by its hidden states, in fp32. Of a sequence with several distributions, such as
    those of start and end, each is a row; they are side by side.
    """
    outputs = tapped.teach(batch, lm_head=("tokens",))
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
        if classes:
            return (head.rows * _sampled_gradients(head, chances_NK[:, 0], seen)).sum()
        # A normal distribution of variance 1 around each value has the same Fisher matrix as random signs.
        return (head.rows * torch.where(chances_NK < 0.5, -1.0, 1.0)).sum()

    if tapped.shortcut and tapped.has_lm_head:
        total = tapped.through_head(batch, loss, "tokens")
        assert total is not None
        return total
    return loss(*judged_rows(tapped, batch))


@torch.no_grad()
def _sampled_gradients(head: HeadInputs, chances_N: Tensor, seen: Callable[[Tensor], object]) -> Tensor:
    """The gradients (N, K) at the rows of the negative log-likelihood of one class per row, sampled from its output.

    The logits are there in chunks. `chances_N` are uniform from 0 to 1.
    """
    gradients_NK = torch.empty_like(head.rows)
    w_VK = head.weight
    words = head.rows.shape[1] if w_VK is None else len(w_VK)
    size = max(_CHUNK_BYTES, 0 if w_VK is None else w_VK.nbytes // 32)
    count = max(1, size // (4 * words))
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
