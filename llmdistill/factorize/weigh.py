"""Weighs the factorization of a model by data: measures moments, decomposes matrices, and chooses the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.factorize.counting import build_reference, layer_linears
from llmdistill.factorize.cuts import divergences
from llmdistill.factorize.install import features, matrix
from llmdistill.factorize.moments import measure_moments
from llmdistill.factorize.plan import plan, rank_budget
from llmdistill.factorize.weighted import Weighted, WeightedSVD, allocate, break_even, weighted_svd
from llmdistill.models.families import base_name


def weigh(
    model: PreTrainedModel,
    settings: FactorizeConfig,
    batches: Sequence[Batch],
    *,
    device: torch.device | None = None,
    reduce: Callable[[Tensor], object] | None = None,
    decompose: bool = True,
) -> Weighted:
    """Return the weighted factorization of a dense model by svd; every rank must call this function.

    Args:
        model: the teacher with its own head, on the device of the forward passes.
        settings: weighting and the sizes.
        batches: this rank's calibration data.
        device: the device on which matrices are decomposed, one at a time; by default the device of the model.
        reduce: sums a tensor over the ranks in place.
        decompose: False on all ranks but one, which then return no factors.

    Raises:
        UserError: the settings do not fit the model, or the data have no token or give numbers that are not finite.
    """
    reference = build_reference(copy.deepcopy(model.config))
    own = {base_name(model, name): name for name in layer_linears(model)}
    if settings.allocation == "loss":
        budget = rank_budget(reference, settings)
        ranks = {base_name(reference, name): break_even(m, n) for name, (m, n) in layer_linears(reference).items()}
        ranks = {name: rank for name, rank in ranks.items() if rank > 0}
    else:
        planned = plan(reference, settings)
        ranks = {base_name(reference, name): cast(int, rank) for name, rank in planned.sizes.items()}
    gradients = settings.weighting == "gradients"
    factors: dict[str, WeightedSVD] = {}
    tokens = 0
    for names in _passes(model, [own[name] for name in ranks], gradients, settings.calibration.memory):
        moments = measure_moments(
            model, names, batches, gradients=gradients, seed=settings.calibration.seed, reduce=reduce
        )
        tokens = next(iter(moments.values())).tokens
        for name in names if decompose else ():
            weight = matrix(model.get_submodule(name)).detach()
            short = base_name(model, name)
            whole = weighted_svd(weight if device is None else weight.to(device), moments.pop(name), ranks[short])
            factors[short] = whole.to(torch.device("cpu"))
    found = Weighted(ranks=ranks, factors=factors, predicted_loss=0.0, tokens=tokens)
    if settings.allocation == "loss" and decompose:
        of_factors = sum(each.shape[0] * each.shape[1] for each in factors.values())
        dense = sum(m * n for m, n in layer_linears(reference).values()) - of_factors
        chosen = allocate(factors, budget - dense, multiple=settings.rank_multiple)
        ranks = {name: rank for name, rank in chosen.items() if rank is not None}
    return found.with_ranks(ranks)


def _passes(model: PreTrainedModel, names: Sequence[str], gradients: bool, memory: float) -> list[list[str]]:
    """Split the linears, in their order, into passes whose moments in fp32 fit into `memory` GiB."""
    passes: list[list[str]] = [[]]
    used = 0.0
    for name in names:
        m, n = features(model.get_submodule(name))
        size = 4 * (n * n + (m * m if gradients else 0)) / 2**30
        if passes[-1] and used + size > memory:
            passes.append([])
            used = 0.0
        passes[-1].append(name)
        used += size
    return passes


def weigh_checked(
    model: PreTrainedModel,
    settings: FactorizeConfig,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    *,
    device: torch.device | None = None,
    reduce: Callable[[Tensor], object] | None = None,
    decompose: bool = True,
) -> Weighted:
    """Return the result of `weigh`, where ranks by the predicted loss must prove themselves on held-out data.

    Predictions add up the costs of cuts that were each made alone. So the cuts to these ranks and to one rank of the
    same size are both tried, and the ranks of the one that is nearer to the teacher are returned.
    """
    found = weigh(model, settings, batches, device=device, reduce=reduce, decompose=decompose)
    if settings.allocation != "loss" or not decompose or not held_out:
        return found
    reference = build_reference(copy.deepcopy(model.config))
    uniform = plan(reference, replace(settings, allocation="uniform"))
    one_rank = found.with_ranks({base_name(reference, name): cast(int, rank) for name, rank in uniform.sizes.items()})
    held = divergences(model, {"loss": found, "uniform": one_rank}, held_out)
    return replace(found if held["loss"] <= held["uniform"] else one_rank, held_out=held)
