"""Weights the factorization of a teacher by data: measures what is still missing, and chooses the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.config.student import RankMultiple
from llmdistill.errors import UserError
from llmdistill.models.families import base_name
from llmdistill.runtime.distributed import World, on_every, on_main
from llmdistill.step.passes import split_batches
from llmdistill.students.counting import Shape, build_reference, layer_linears
from llmdistill.students.install import can_factorize_embedding, token_embedding
from llmdistill.students.sizes import check_factorization, plan_embedding, plan_factors, rank_budget
from llmdistill.students.start.calibration_folder import SavedFactors
from llmdistill.students.start.cuts import divergences
from llmdistill.students.start.embedding_rank import choose_with_table, nearest_choice
from llmdistill.students.start.measure import Measurement, first_tokens
from llmdistill.students.start.sampled import graph_tokens, tokens_at_a_time
from llmdistill.students.start.table_moments import TableMoments
from llmdistill.students.start.weighted import Options, WeightedSVD, allocate
from llmdistill.students.start.weighted_embedding import WeightedTable, nested_table, weighted_table
from llmdistill.students.start.weighted_factors import NOTHING, WeightedFactors
from llmdistill.students.start.weighted_kronecker import WeightedKronecker
from llmdistill.students.svd import useful_ranks
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
    reference = build_reference(parts.config)
    plan_embedding(reference, settings, method)
    if method == "svd":
        return _choose_checked_ranks(parts, settings)
    products: dict[str, WeightedKronecker] = {}
    sizes = {base_name(reference, name): size for name, size in plan_factors(reference, settings, method).sizes.items()}
    if sizes:
        shapes, measurement = _matrix_shapes(reference), _make_measurement(parts, settings, method)
        measurement.factors(shapes, sizes, lambda name, factors, _: products.update({name: factors}), parts.say)
    return replace(NOTHING, others=products, predicted_loss=sum(factors.cost for factors in products.values()))


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
    world, is_auto = World.current(), settings.embedding_rank == "auto"
    tables: list[TableMoments] = []
    has_table = is_auto or settings.table_rank is not None
    factors = measure_factors(parts, settings, tables.append if has_table else None)
    losses = _predict_losses(parts, settings, factors)
    table = None
    if has_table:
        rank, (moments,) = settings.table_rank, tables
        decompose = partial(nested_table if rank is None else partial(weighted_table, rank=rank), moments=moments)
        table = _make_measurement(parts, settings).table(decompose)

    def choose(chosen: FactorizeConfig, table: WeightedTable | None) -> WeightedFactors:
        # Factors are on rank 0 alone, so only it can choose ranks.
        if not world.is_main:
            return NOTHING
        weighted = choose_ranks(parts.config, chosen, factors, table)
        if settings.allocation != "loss":
            return weighted
        known = {name: float(losses[name][rank]) for name, rank in weighted.ranks.items() if name in losses}
        weighted = weighted.with_losses(known)
        return choose_ranks(parts.config, chosen, weighted.factors, table) if chosen.allocation == "loss" else weighted

    held_out = list[Batch]()
    if settings.allocation == "loss" and settings.calibration.held_out != 0:
        model = parts.teacher().model
        held_out = split_batches(first_tokens(model, parts.batches()[1]), tokens_at_a_time(model))
    dense, of_dense = replace(settings, embedding_rank=settings.table_rank), None if is_auto else table
    if not held_out:
        return on_every(partial(choose, dense, of_dense))

    def measure(cuts: Mapping[str, WeightedFactors]) -> dict[str, float]:
        # The other ranks of a sharded teacher take part in its forward passes; without factors they lower no rank.
        teacher = parts.teacher()
        return divergences(teacher.model, cuts, held_out) if world.is_main or teacher.sharded else {}

    tried = {"loss": dense, "uniform": settings.with_one_rank()}
    if is_auto:  # a large embedding may leave nothing of the target, unless it gets a lower rank too
        reference = build_reference(parts.config)
        tried = {name: chosen for name, chosen in tried.items() if _reaches(reference, chosen)}
    choices = on_every(lambda: {name: choose(chosen, of_dense) for name, chosen in tried.items()})
    divergence_by_choice = measure(choices)
    if is_auto:
        alone = choices["loss"].predicted_loss if "loss" in choices else 0.0
        together = max(1.0, divergence_by_choice["loss"] / alone) if alone > 0 else 1.0
        narrower = choose_with_table(table, partial(choose, settings), together, measure)
        if narrower is not None:
            choices["embedding"] = narrower
            divergence_by_choice |= measure({"embedding": narrower})
    if not world.is_main:
        return NOTHING
    return replace(choices[nearest_choice(divergence_by_choice)], held_out=divergence_by_choice)


def _reaches(reference: PreTrainedModel, settings: FactorizeConfig) -> bool:
    """Return whether ranks of the layers' linears alone reach the target."""
    try:
        rank_budget(reference, settings) if settings.allocation == "loss" else _plan_ranks(reference, settings)
    except UserError:
        return False
    return True


def _predict_losses(
    parts: CalibrationParts, settings: FactorizeConfig, factors: Mapping[str, WeightedSVD]
) -> dict[str, Tensor]:
    """Return the predicted loss of every rank of each matrix, on rank 0; empty if nothing needs it.

    Every rank must call this function.
    """
    # A folder must serve every allocation, so it gets the losses even if this run does not need them.
    if settings.allocation != "loss" and (parts.saved is None or settings.weighting != "gradients"):
        return {}
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
    return losses


def measure_factors(
    parts: CalibrationParts,
    settings: FactorizeConfig,
    keep_table: Callable[[TableMoments], object] | None = None,
) -> Mapping[str, WeightedSVD]:
    """Return the factors of the matrices, on rank 0; every rank must call this function.

    Without a folder they are measured up to the ranks that the settings can need; with one up to the full rank, so that
    they serve any size and form. Matrices that the folder holds are not measured again. `keep_table` takes the moments
    of the token embedding on every rank, for a rank of its own; a folder gets them in any case.

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
    wants_table = keep_table is not None or (parts.saved is not None and can_factorize_embedding(reference))
    table: TableMoments | None = None

    def open_folder() -> tuple[list[str], bool]:
        nonlocal factors, table
        factors = factors if parts.saved is None else parts.saved()
        table = factors.table if isinstance(factors, SavedFactors) else None
        return [name for name in ranks if name not in factors], table is not None

    def receive(moments: TableMoments) -> None:
        nonlocal table
        table = moments
        if isinstance(factors, SavedFactors):  # at once, as it is measured in the first of the passes
            factors.table = moments

    missing, has_table = on_main(open_folder)
    # An embedding that nobody asked for is only measured beside matrices, not in a pass of its own.
    wants_table = wants_table and not has_table
    if parts.saved is not None:
        parts.say(f"{len(ranks) - len(missing)} of {len(ranks)} matrices are measured already")
    wants_table_alone = not missing and wants_table and keep_table is not None
    if missing or wants_table_alone:
        measurement = _make_measurement(parts, settings)  # reads the data: if it cannot, the folder stays free
        on_main(lambda: factors.claim() if isinstance(factors, SavedFactors) else None)
    if missing:

        def save(name: str, svd: WeightedSVD, seconds: float) -> None:
            factors[name] = replace(svd, seconds=seconds)

        known, keep = set(ranks) - set(missing), receive if wants_table else None
        measurement.factors(shapes, ranks, save, parts.say, known, keep)

        def check() -> None:
            if not any(name in factors for name in ranks):
                raise UserError(
                    "the calibration data give no matrix any input or gradient: name other data, or leave weighting out"
                )

        on_main(check)
    elif wants_table_alone:
        receive(measurement.table_moments())
    if keep_table is not None:
        keep_table(cast(TableMoments, table))  # None on the other ranks if rank 0 read it
    return factors


def choose_ranks(
    config: PreTrainedConfig,
    settings: FactorizeConfig,
    factors: Mapping[str, WeightedSVD],
    table: WeightedTable | None = None,
) -> WeightedFactors:
    """Return the ranks of a teacher's matrices, as the settings and the factors decide them.

    Args:
        config: that of the teacher.
        settings: size, allocation and form.
        factors: the factors of the matrices.
        table: the factors of the token embedding: of the rank in the settings, or of all if that is auto.

    Raises:
        UserError: the settings do not fit the model.
    """
    reference, embedding = build_reference(config), dict[str, WeightedTable]()
    if table is not None:
        embedding = {base_name(reference, token_embedding(reference)[0]): table}
    own = embedding if settings.table_rank is not None else {}
    unranked = WeightedFactors(ranks={}, factors=factors, predicted_loss=0.0, others=own)
    if settings.allocation != "loss":
        return unranked.with_ranks(_plan_ranks(reference, settings))
    # The data never reach the others, so the cost of lowering their ranks is unknown.
    budget = rank_budget(reference, settings, [name for name in _matrix_shapes(reference) if name not in factors])
    multiple, options = settings.rank_multiple, dict[str, Options]()
    if settings.embedding_rank == "auto":
        options = {name: _options_of_table(table, multiple) for name, table in embedding.items()}
    chosen = allocate(factors, budget, multiple=multiple, form=settings.stored_form, others=options)
    ranks = {name: rank for name, rank in chosen.items() if rank is not None}
    lowered = {name: embedding[name].leading(ranks.pop(name)) for name in options if name in ranks}
    return replace(unranked, others={**own, **lowered}).with_ranks(ranks)


def _options_of_table(table: WeightedTable, multiple: RankMultiple) -> Options:
    vocabulary, width = table.shape
    ranks = useful_ranks(vocabulary, width, multiple)
    return [
        *((rank * (vocabulary + width), table.losses[rank], rank) for rank in ranks),
        (vocabulary * width, 0.0, None),
    ]


def _matrix_shapes(reference: PreTrainedModel) -> dict[str, Shape]:
    """Return (m, n) of the matrices, by their names in the base model."""
    return {base_name(reference, name): shape for name, shape in layer_linears(reference).items()}


def _plan_ranks(reference: PreTrainedModel, settings: FactorizeConfig) -> dict[str, int]:
    linears = layer_linears(reference)  # the stacks of experts are no linears, and not measured
    sizes = plan_factors(reference, settings).sizes
    return {base_name(reference, name): cast(int, rank) for name, rank in sizes.items() if name in linears}
