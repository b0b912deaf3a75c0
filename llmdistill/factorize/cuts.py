"""Cuts that are tried on a loaded model, without a second one: its linears answer as those of a student would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.factorize.moments import judged_rows, run_sampled, tapped_output
from llmdistill.factorize.weighted import Weighted, WeightedSVD
from llmdistill.losses.divergence import log_softmax
from llmdistill.models.passes import HookSums


@contextmanager
def cut(model: PreTrainedModel, weighted: Weighted) -> Iterator[None]:
    """Let the factorized linears of a dense model return what the student's would; the model keeps its weights.

    The products are computed in fp32, and each factor is moved to the device of the inputs when it is needed, so this
    takes the memory of one matrix. The token embedding stays whole. Whoever measures moments inside this block measures
    those of the cut model.
    """
    base = model.base_model
    # They run before all other hooks: those of ZeRO-3 release the bias, and those that measure see the new output.
    handles = [
        base.get_submodule(name).register_forward_hook(_product(weighted.factors[name], rank), prepend=True)
        for name, rank in weighted.ranks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _product(factors: WeightedSVD, rank: int) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return _answer(module, inputs[0], factors, rank).to(output.dtype)

    return hook


def _answer(module: nn.Module, inputs: Tensor, factors: WeightedSVD, rank: int) -> Tensor:
    """What a linear would return with factors of a rank, in fp32."""
    right, values, left = (
        each.to(inputs.device) for each in (factors.right[:rank], factors.values[:rank], factors.left[:, :rank])
    )
    product = functional.linear(functional.linear(inputs.float(), right) * values, left)
    bias = cast("Tensor | None", module.bias)
    return product if bias is None else product + bias.float()


def cut_costs(
    model: PreTrainedModel,
    weighted: Weighted,
    batches: Sequence[Batch],
    *,
    seed: int = 0,
    reduce: Callable[[Tensor], object] | None = None,
    rounds: int = 0,
) -> dict[str, float]:
    """Return what each cut, made alone, is predicted to cost per token, by the name of the linear in the base model.

    With the gradients g of sampled labels and the inputs x of a sequence's tokens this is half of (Σ gᵀ ΔW x)², summed
    over the sequences: the Fisher matrix of the weight itself. `WeightedSVD.costs` takes x and g for independent in
    place of it, which is wrong by a factor of 2 to 7 for gated feed-forward layers, and for queries and keys. One pass
    over the data gives the costs of all cuts.

    Args:
        model: the dense model, whose mode and weights stay as they are.
        weighted: the cuts, with the factors of their ranks on every rank.
        batches: the batches of this rank, a sequence in each row, on any device.
        seed: the seed of the labels.
        reduce: sums a tensor over the ranks in place.
        rounds: the smallest number of passes, see `measure_moments`.
    """
    sums = _CutCosts(model, weighted)
    run_sampled(model, batches, sums, gradients=True, seed=seed, rounds=rounds)
    if reduce is not None:
        for each in (sums.tokens, sums.costs):
            reduce(each)
    costs: list[float] = (sums.costs / sums.tokens).tolist()
    return dict(zip(weighted.ranks, costs, strict=True))


class _CutCosts(HookSums):
    """Adds up what cuts cost in forward and backward hooks."""

    def __init__(self, model: PreTrainedModel, weighted: Weighted) -> None:
        super().__init__(model.device)
        self._weighted = weighted
        self.costs = torch.zeros(len(weighted.ranks), dtype=torch.float64, device=model.device)
        # As in `cut`, before the hooks of ZeRO-3 release the bias.
        self.handles = [
            model.base_model.get_submodule(name).register_forward_hook(self._hook(number, name), prepend=True)
            for number, name in enumerate(weighted.ranks)
        ]

    def _hook(self, number: int, name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            with torch.no_grad():
                factors, rank = self._weighted.factors[name], self._weighted.ranks[name]
                change = _answer(module, inputs[0], factors, rank) - output.float()

            def add(gradient: Tensor) -> None:
                moved_B = ((gradient.float() * change).sum(-1) * self.mask).sum(-1)
                self.costs[number] += moved_B.double().square().sum() / 2

            output.requires_grad_(True).register_hook(add)  # no weight requires a gradient, so the graph begins here

        return hook


@torch.no_grad()
def divergences(model: PreTrainedModel, cuts: Mapping[str, Weighted], batches: Iterable[Batch]) -> dict[str, float]:
    """Return how far a model moves from itself by each cut: a mean over real tokens, or sequences of a classifier.

    It is KL(whole‖cut) of the logits in nats; for scores, and for the last hidden states of models without a head, half
    the squared distance.

    Args:
        model: the dense model, whose mode and weights stay as they are.
        cuts: the cuts by name.
        batches: the batches, on any device.
    """
    totals, count, training = dict.fromkeys(cuts, 0.0), 0, model.training
    run = tapped_output(model.eval())
    try:
        for batch in batches:
            moved = batch.to(model.device)
            whole, classes, _ = judged_rows(run(moved), moved)
            count += len(whole)
            for name, weighted in cuts.items():
                with cut(model, weighted):
                    changed = judged_rows(run(moved), moved)[0]
                totals[name] += _distance(whole, changed, classes)
    finally:
        run.remove()
        model.train(training)
    return {name: total / max(count, 1) for name, total in totals.items()}


def _distance(whole_NK: Tensor, changed_NK: Tensor, classes: bool) -> float:
    if not classes:
        return float((whole_NK - changed_NK).square().sum() / 2)
    log_whole, log_changed = log_softmax(whole_NK), log_softmax(changed_NK)
    return float((log_whole.exp() * (log_whole - log_changed)).sum())
