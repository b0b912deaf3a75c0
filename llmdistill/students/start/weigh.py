"""Weights the factorization of a teacher by data: measures what is still missing, and chooses the ranks."""

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
from llmdistill.step.passes import split_batches
from llmdistill.students.counting import Shape, build_reference, layer_linears
from llmdistill.students.install import token_embedding
from llmdistill.students.sizes import check_factorization, plan_embedding, plan_factors, rank_budget
from llmdistill.students.start.calibration_folder import SavedFactors
from llmdistill.students.start.cuts import divergences
from llmdistill.students.start.measure import Measurement, first_tokens
from llmdistill.students.start.sampled import graph_tokens, tokens_at_a_time
from llmdistill.students.start.weighted import WeightedSVD, allocate
from llmdistill.students.start.weighted_factors import WeightedFactors
from llmdistill.teachers.live import LoadedTeacher


@dataclass(frozen=True, kw_only=True)
class CalibrationParts:
    """The teacher and the data of a calibration. Either is loaded only if something must be measured on it."""

    config: PreTrainedConfig
    """The config of the teacher."""
    teacher: Callable[[], LoadedTeacher]
    """Loads the teacher, or returns it if it is loaded."""
    batches: Callable[[], tuple[Sequence[Batch], Sequence[Batch]]]
    """Reads this rank's batches, and the held-out batches, which every rank has."""
    device: torch.device | None = None
    """The device on which matrices are decomposed, one at a time; by default that of each matrix."""
    saved: Callable[[], SavedFactors] | None = None
    """Opens the folder in which the factors are saved, on rank 0; None saves nothing."""
    say: Callable[[str], object] = lambda _: None
    """Takes sentences about the progress."""


def weigh(parts: CalibrationParts, settings: FactorizeConfig, method: str = "svd") -> WeightedFactors:
    """Return the weighted factorization, with ranks that are checked on held-out data.

    The predicted loss adds up the costs of lowering one matrix at a time. So these ranks and a single rank of the same
    size are both tried, and those that stay nearer to the teacher are returned. Every rank must call this function;
    only rank 0 gets factors.

    Raises:
        UserError: the settings do not fit the model, the data have no token or give numbers that are not finite, or the
            folder of saved factors holds something else.
    """
    check_factorization(settings, method)
    reference, weighted = build_reference(parts.config), _NOTHING
    plan_embedding(reference, settings, method)
    others: dict[str, Any] = {}  # factors that fit one size only
    if method == "svd":
        weighted = _choose_checked_ranks(parts, settings)
    else:
        sizes = {
            base_name(reference, name): size for name, size in plan_factors(reference, settings, method).sizes.items()
        }
        if sizes:
            shapes, measurement = _matrix_shapes(reference), _make_measurement(parts, settings, method)
            measurement.factors(shapes, sizes, lambda name, factors, _: others.update({name: factors}), parts.say)
    if settings.embedding_rank is not None:
        table = _make_measurement(parts, settings).table(settings.embedding_rank)
        if table is not None:
            others[base_name(reference, token_embedding(reference)[0])] = table
    loss = weighted.predicted_loss + sum(factors.cost for factors in others.values())
    return replace(weighted, others=others, predicted_loss=loss)


_NOTHING = WeightedFactors(ranks={}, factors={}, predicted_loss=0.0)


def _make_measurement(parts: CalibrationParts, settings: FactorizeConfig, method: str = "svd") -> Measurement:
    model = parts.teacher().model
    # Parts of so few tokens that the graph of a backward pass stays small beside the model. Saved sums count the parts,
    # so these must not follow from what is free at the time.
    part_tokens = tokens_at_a_time if parts.saved is None else graph_tokens
    return Measurement(
        model=model,
        batches=split_batches(parts.batches()[0], part_tokens(model)),
        settings=settings.calibration,
        gradients=settings.weighting == "gradients",
        method=method,
        device=parts.device,
    )


def _choose_checked_ranks(parts: CalibrationParts, settings: FactorizeConfig) -> WeightedFactors:
    """Choose the ranks as `weigh` does, and return them with their factors."""
    factors, world = _make_factors(parts, settings), World.current()
    checks = settings.allocation == "loss" and settings.calibration.held_out != 0
    names: tuple[Allocation, ...] = ("loss", "uniform") if checks else (settings.allocation or "uniform",)

    def choose() -> dict[str, WeightedFactors]:
        if not world.is_main:
            # Factors are on rank 0 alone, so only it can choose ranks.
            return dict.fromkeys(names, _NOTHING)
        return {name: choose_ranks(parts.config, replace(settings, allocation=name), factors) for name in names}

    choices = on_every(choose)
    if not checks:
        return choices[names[0]]
    teacher, (_, held_out) = parts.teacher(), parts.batches()
    if not held_out or not (world.is_main or teacher.sharded):
        return choices["loss"]
    # The other ranks of a sharded teacher take part in its forward passes; without factors they lower no rank.
    batches = split_batches(first_tokens(teacher.model, held_out), tokens_at_a_time(teacher.model))
    divergence_by_choice = divergences(teacher.model, choices, batches)
    return replace(
        choices["loss" if divergence_by_choice["loss"] <= divergence_by_choice["uniform"] else "uniform"],
        held_out=divergence_by_choice,
    )


def _make_factors(parts: CalibrationParts, settings: FactorizeConfig) -> Mapping[str, WeightedSVD]:
    """Return the factors of the matrices on rank 0, with costs that are corrected by predicted losses near the budget.

    Every rank must call this function.
    """
    factors, world = measure_factors(parts, settings), World.current()
    # A folder must serve every allocation, so it gets the losses even if this run does not need them.
    if settings.allocation != "loss" and (parts.saved is None or settings.weighting != "gradients"):
        return factors
    folder, losses = factors if isinstance(factors, SavedFactors) else None, dict[str, Tensor]()

    def are_known() -> bool:
        nonlocal losses
        losses = {} if folder is None else folder.predicted_losses
        return bool(losses)

    # All ranks must go the same way: measuring takes all of them, and only rank 0 sees the folder.
    if not on_main(are_known):
        # Names come from the config, which all ranks have; the others have no factors to list them by.
        names = _matrix_shapes(build_reference(parts.config))
        losses = _make_measurement(parts, settings).predict_losses(factors, names)
        if folder is not None:
            folder.predicted_losses = losses
    if settings.allocation != "loss":
        return factors

    def correct_costs() -> Mapping[str, WeightedSVD]:
        if not world.is_main:
            return factors
        weighted = choose_ranks(parts.config, settings, factors)
        return weighted.with_losses({name: float(losses[name][rank]) for name, rank in weighted.ranks.items()}).factors

    return on_every(correct_costs)


def measure_factors(parts: CalibrationParts, settings: FactorizeConfig) -> Mapping[str, WeightedSVD]:
    """Return the factors of the matrices, on rank 0; every rank must call this function.

    Without a folder they are measured up to the ranks that the settings can need; with one up to the full rank, so that
    they serve any size and form. Matrices that the folder holds are not measured again.

    Raises:
        UserError: see `weigh`.
    """
    reference = build_reference(parts.config)
    shapes = _matrix_shapes(reference)
    ranks = {name: min(shape) for name, shape in shapes.items()}
    # The settings are checked before any work.
    if settings.allocation == "loss":
        rank_budget(reference, settings)
    else:
        planned = _plan_ranks(reference, settings)
        ranks = planned if parts.saved is None else ranks
    factors: dict[str, WeightedSVD] | SavedFactors = {}

    def open_folder() -> list[str]:
        nonlocal factors
        factors = factors if parts.saved is None else parts.saved()
        return [name for name in ranks if name not in factors]

    missing = on_main(open_folder)
    if parts.saved is not None:
        parts.say(f"{len(ranks) - len(missing)} of {len(ranks)} matrices are measured already")
    if missing:

        def save(name: str, svd: WeightedSVD, seconds: float) -> None:
            factors[name] = replace(svd, seconds=seconds)

        measurement = _make_measurement(parts, settings)
        measurement.factors(shapes, ranks, save, parts.say, set(ranks) - set(missing))

        def check() -> None:
            if not any(name in factors for name in ranks):
                raise UserError(
                    "the calibration data give no matrix any input or gradient: name other data, or leave weighting out"
                )

        on_main(check)
    return factors


def choose_ranks(
    config: PreTrainedConfig, settings: FactorizeConfig, factors: Mapping[str, WeightedSVD]
) -> WeightedFactors:
    """Return the ranks of a teacher's matrices, as the settings and the factors decide them.

    Raises:
        UserError: the settings do not fit the model.
    """
    reference, unranked = build_reference(config), WeightedFactors(ranks={}, factors=factors, predicted_loss=0.0)
    if settings.allocation != "loss":
        return unranked.with_ranks(_plan_ranks(reference, settings))
    # The data never reach the others, so the cost of lowering their ranks is unknown.
    budget = rank_budget(reference, settings, [name for name in _matrix_shapes(reference) if name not in factors])
    chosen = allocate(factors, budget, multiple=settings.rank_multiple, form=settings.stored_form)
    return unranked.with_ranks({name: rank for name, rank in chosen.items() if rank is not None})


def _matrix_shapes(reference: PreTrainedModel) -> dict[str, Shape]:
    """Return (m, n) of the matrices, by their names in the base model."""
    return {base_name(reference, name): shape for name, shape in layer_linears(reference).items()}


def _plan_ranks(reference: PreTrainedModel, settings: FactorizeConfig) -> dict[str, int]:
    linears = layer_linears(reference)  # the stacks of experts are no linears, and not measured
    sizes = plan_factors(reference, settings).sizes
    return {base_name(reference, name): cast(int, rank) for name, rank in sizes.items() if name in linears}
