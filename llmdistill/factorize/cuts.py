"""Cuts that are tried on a loaded model, without a second one: its linears answer as those of a student would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.factorize.moments import judged_rows, tapped_output
from llmdistill.factorize.weighted import Weighted, WeightedSVD


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
        right, values, left = (
            each.to(output.device) for each in (factors.right[:rank], factors.values[:rank], factors.left[:, :rank])
        )
        product = functional.linear(functional.linear(inputs[0].float(), right) * values, left)
        bias = cast("Tensor | None", module.bias)
        return (product if bias is None else product + bias.float()).to(output.dtype)

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
    log_whole, log_changed = whole_NK.log_softmax(-1), changed_NK.log_softmax(-1)
    return float((log_whole.exp() * (log_whole - log_changed)).sum())
