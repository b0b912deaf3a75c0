"""Weighs the factorization of a teacher by data: measures what is not known yet, and chooses the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.config.student import Allocation
from llmdistill.errors import UserError
from llmdistill.models.families import base_name
from llmdistill.runtime.distributed import World, on_every, on_main
from llmdistill.step.passes import in_parts
from llmdistill.students.counting import Shape, build_reference, layer_linears
from llmdistill.students.install import token_embedding
from llmdistill.students.sizes import check_settings, plan, plan_embedding, rank_budget
from llmdistill.students.start.calibration_folder import KeptFactors
from llmdistill.students.start.cuts import divergences
from llmdistill.students.start.measure import Measurement, first_tokens
from llmdistill.students.start.sampled import graph_tokens
from llmdistill.students.start.weighted import Weighted, WeightedSVD, allocate
from llmdistill.teachers.live import LiveTeacher


@dataclass(frozen=True, kw_only=True)
class Source:
    """The teacher and the data of a calibration. Either is loaded only if something must be measured on it."""

    config: PreTrainedConfig
    """The config of the teacher."""
    teacher: Callable[[], LiveTeacher]
    """Loads the teacher, or returns it if it is loaded."""
    batches: Callable[[], tuple[Sequence[Batch], Sequence[Batch]]]
    """Reads this rank's batches, and the held-out batches, which every rank has."""
    device: torch.device | None = None
    """The device on which matrices are decomposed, one at a time; by default that of each matrix."""
    kept: Callable[[], KeptFactors] | None = None
    """Opens the folder in which the factors are kept, on rank 0; None keeps nothing."""
    say: Callable[[str], object] = lambda _: None
    """Takes sentences about the progress."""


def weigh(source: Source, settings: FactorizeConfig, method: str = "svd") -> Weighted:
    """Return the weighted factorization, where ranks by the predicted loss must prove themselves on held-out data.

    Predictions add up the losses of cuts that were each made alone. So the cuts to these ranks and to one rank of the
    same size are both tried, and the ranks of the one that is nearer to the teacher are returned. Every rank must call
    this function; only rank 0 gets factors.

    Raises:
        UserError: the settings do not fit the model, the data have no token or give numbers that are not finite, or the
            folder of kept factors holds something else.
    """
    check_settings(settings, method)
    reference, found = build_reference(source.config), _NOTHING
    plan_embedding(reference, settings, method)
    others: dict[str, Any] = {}  # what fits one size only
    if method == "svd":
        found = _checked_ranks(source, settings)
    else:
        sizes = {base_name(reference, name): size for name, size in plan(reference, settings, method).sizes.items()}
        if source.kept is not None:
            raise UserError(
                "student.factorize.calibration.folder keeps factors of the method svd, which serve every rank, but the "
                f"method is {method}, whose factors fit one shape: set the folder to null"
            )
        if sizes:
            shapes, measurement = _shapes(reference), _measurement(source, settings, method)
            measurement.factors(shapes, sizes, lambda name, each, _: others.update({name: each}), source.say)
    if settings.embedding_rank is not None:
        table = _measurement(source, settings).table(settings.embedding_rank)
        if table is not None:
            others[base_name(reference, token_embedding(reference)[0])] = table
    loss = found.predicted_loss + sum(each.cost for each in others.values())
    return replace(found, others=others, predicted_loss=loss)


_NOTHING = Weighted(ranks={}, factors={}, predicted_loss=0.0)


def _measurement(source: Source, settings: FactorizeConfig, method: str = "svd") -> Measurement:
    model = source.teacher().model
    return Measurement(
        model=model,
        batches=in_parts(source.batches()[0], graph_tokens(model)),
        settings=settings.calibration,
        gradients=settings.weighting == "gradients",
        method=method,
        device=source.device,
    )


def _checked_ranks(source: Source, settings: FactorizeConfig) -> Weighted:
    """The ranks that `weigh` chooses, with their factors."""
    factors, world = _factors(source, settings), World.current()
    checks = settings.allocation == "loss" and settings.calibration.held_out != 0
    names: tuple[Allocation, ...] = ("loss", "uniform") if checks else (settings.allocation,)

    def choose() -> dict[str, Weighted]:
        if not world.is_main:
            return dict.fromkeys(names, _NOTHING)
        return {name: choose_ranks(source.config, replace(settings, allocation=name), factors) for name in names}

    found = on_every(choose)
    if not checks:
        return found[settings.allocation]
    teacher, (_, held_out) = source.teacher(), source.batches()
    if not held_out or not (world.is_main or teacher.sharded):
        return found["loss"]
    # The other ranks of a sharded teacher take part in its forward passes, with nothing cut.
    parts = in_parts(first_tokens(teacher.model, held_out), graph_tokens(teacher.model))
    held = divergences(teacher.model, found, parts)
    return replace(found["loss" if held["loss"] <= held["uniform"] else "uniform"], held_out=held)


def _factors(source: Source, settings: FactorizeConfig) -> Mapping[str, WeightedSVD]:
    """The factors of the matrices on rank 0; their costs are corrected by those of cuts near to the budget.

    Every rank must call this function.
    """
    factors, world = measured(source, settings), World.current()
    # What is kept serves every allocation.
    if settings.allocation != "loss" and (source.kept is None or settings.weighting != "gradients"):
        return factors
    kept, costs = factors if isinstance(factors, KeptFactors) else None, dict[str, Tensor]()

    def are_known() -> bool:
        nonlocal costs
        costs = {} if kept is None else kept.costs
        return bool(costs)

    if not on_main(are_known):
        costs = _measurement(source, settings).costs_of(factors, _shapes(build_reference(source.config)))
        if kept is not None:
            kept.costs = costs
    if settings.allocation != "loss":
        return factors

    def corrected() -> Mapping[str, WeightedSVD]:
        if not world.is_main:
            return factors
        found = choose_ranks(source.config, settings, factors)
        return found.corrected({name: float(costs[name][rank]) for name, rank in found.ranks.items()}).factors

    return on_every(corrected)


def measured(source: Source, settings: FactorizeConfig) -> Mapping[str, WeightedSVD]:
    """Return the factors of the matrices, on rank 0; every rank must call this function.

    Without a folder they are measured up to the ranks that the settings can need, and with one up to the full rank, so
    that they serve any size and form. What the folder has is not measured again.

    Raises:
        UserError: see `weigh`.
    """
    reference = build_reference(source.config)
    shapes = _shapes(reference)
    ranks = {name: min(shape) for name, shape in shapes.items()}
    # The settings are checked before any work.
    if settings.allocation == "loss":
        rank_budget(reference, settings)
    else:
        planned = _planned(reference, settings)
        ranks = planned if source.kept is None else ranks
    factors: dict[str, WeightedSVD] | KeptFactors = {}

    def open_folder() -> list[str]:
        nonlocal factors
        factors = factors if source.kept is None else source.kept()
        return [name for name in ranks if name not in factors]

    missing = on_main(open_folder)
    if source.kept is not None:
        source.say(f"{len(ranks) - len(missing)} of {len(ranks)} matrices are measured already")
    if missing:

        def keep(name: str, found: WeightedSVD, seconds: float) -> None:
            factors[name] = replace(found, seconds=seconds)

        measurement = _measurement(source, settings)
        measurement.factors(shapes, ranks, keep, source.say, set(ranks) - set(missing))

        def check() -> None:
            if not any(name in factors for name in ranks):
                raise UserError(
                    "the calibration data give no matrix any input or gradient: name other data, or leave weighting out"
                )

        on_main(check)
    return factors


def choose_ranks(config: PreTrainedConfig, settings: FactorizeConfig, factors: Mapping[str, WeightedSVD]) -> Weighted:
    """Return the ranks of a teacher's matrices, as the settings and the factors decide them.

    Raises:
        UserError: the settings do not fit the model.
    """
    reference, found = build_reference(config), Weighted(ranks={}, factors=factors, predicted_loss=0.0)
    if settings.allocation == "uniform":
        return found.with_ranks(_planned(reference, settings))
    # Nothing is known of what a cut of the others costs: the data never run them.
    budget = rank_budget(reference, settings, [name for name in _shapes(reference) if name not in factors])
    chosen = allocate(factors, budget, multiple=settings.rank_multiple, form=settings.form)
    return found.with_ranks({name: rank for name, rank in chosen.items() if rank is not None})


def _shapes(reference: PreTrainedModel) -> dict[str, Shape]:
    """(m, n) of the matrices, by their names in the base model."""
    return {base_name(reference, name): shape for name, shape in layer_linears(reference).items()}


def _planned(reference: PreTrainedModel, settings: FactorizeConfig) -> dict[str, int]:
    linears = layer_linears(reference)  # of the experts' stacks nothing is measured
    sizes = plan(reference, settings).sizes
    return {base_name(reference, name): cast(int, rank) for name, rank in sizes.items() if name in linears}
