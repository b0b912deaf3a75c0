"""Measures the moments of a teacher in passes that fit into memory, and decomposes its matrices on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig
from llmdistill.factorize.counting import Shape
from llmdistill.factorize.cuts import cut_costs
from llmdistill.factorize.install import matrix, token_embedding
from llmdistill.factorize.kinds import Size
from llmdistill.factorize.moments import Moments, measure_moments, shared_inputs
from llmdistill.factorize.table_moments import TableMoments, measure_table
from llmdistill.factorize.weighted import Weighted, WeightedSVD
from llmdistill.factorize.weighted_embedding import WeightedTable, weighted_table
from llmdistill.factorize.weighted_kinds import WEIGHTED_KINDS
from llmdistill.models.sharded import gathered
from llmdistill.runtime.distributed import (
    World,
    all_reduce_sum,
    from_main,
    largest_number,
    on_every,
    on_main,
    sum_at,
    to_main,
)

GIB = 2**30
_OTHER_LABELS = 2**31
"""Added to the seed of the labels, so that a cut is not judged by those that it was fitted to."""


@dataclass(frozen=True)
class Pass:
    """The linears that are measured in one pass over the data."""

    groups: Sequence[Sequence[str]]
    """Names of linears; those of a group read the same tensor."""
    bytes: int
    """Memory of their moments in fp32."""

    @property
    def names(self) -> list[str]:
        """The names of all linears."""
        return [name for group in self.groups for name in group]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the factors of a teacher's matrices are measured on, and how."""

    model: PreTrainedModel
    """The dense teacher, whole or sharded by ZeRO-3."""
    batches: Sequence[Batch]
    """This rank's calibration data, at least one batch."""
    settings: CalibrationConfig
    """Seed and memory."""
    gradients: bool
    """Whether G is measured."""
    world: World
    method: str = "svd"
    """The method of the factorization."""
    device: torch.device | None = None
    """The device on which matrices are decomposed, one at a time; by default that of each matrix."""

    def factors(
        self,
        shapes: Mapping[str, Shape],
        wanted: Mapping[str, Size],
        keep: Callable[[str, Any, float], object],
        say: Callable[[str], object],
    ) -> None:
        """Measure and decompose matrices; every rank must call this function.

        The matrices of a pass are dealt to the ranks. The sums over the ranks go to the rank that decomposes the
        matrix, and the factors go to rank 0, one matrix after the other.

        Args:
            shapes: (m, n) of the matrices, by their names in the base model.
            wanted: the number of leading factors that are kept, or the Kronecker shape, by the same names.
            keep: takes the name of a matrix, its factors and its share of the seconds of a pass, on rank 0, as soon as
                the pass has ended.
            say: takes the plan as a sentence.

        Raises:
            UserError: the data have no token or give numbers that are not finite.
        """
        model, world = self.model, self.world
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        sizes = {prefix + name: shapes[name] for name in wanted}
        wanted = {prefix + name: size for name, size in wanted.items()}
        groups = shared_inputs(model, sizes, self.batches[0])
        passes = plan_passes(groups, sizes, gradients=self.gradients, memory=self.settings.memory)
        most, plural = max(each.bytes for each in passes) / GIB, "" if len(passes) == 1 else "es"
        say(f"{len(passes)} pass{plural} of at most {most:.3g} GiB of statistics")
        rounds = largest_number(len(self.batches), world)
        for each in passes:
            began = time.perf_counter()
            owners = deal(each.groups, sizes, world.size)
            found = self._decomposed(owners, wanted, self._moments(owners, rounds))
            share = (time.perf_counter() - began) / len(owners)
            for name, owner in owners.items():
                factors = self._brought(found.pop(name, None), sizes[name], wanted[name], owner)
                if factors is not None:
                    keep(name.removeprefix(prefix), factors.to(torch.device("cpu")), share)

    def costs_of(self, found: Weighted) -> dict[str, float]:
        """Return the result of `cut_costs` for cuts whose factors are on rank 0; every rank must call this function."""
        model, world = self.model, self.world
        ranks, shapes = on_main(lambda: _cut_sizes(found), world)
        cuts = {name: self._everywhere(found.factors.get(name), shapes[name], rank) for name, rank in ranks.items()}
        return cut_costs(
            model,
            Weighted(ranks=ranks, factors=cuts, predicted_loss=0.0),
            self.batches,
            seed=self.settings.seed + _OTHER_LABELS,
            reduce=all_reduce_sum,
            rounds=largest_number(len(self.batches), world),
        )

    def _everywhere(self, factors: WeightedSVD | None, shape: Shape, rank: int) -> WeightedSVD:
        """The leading factors of a matrix on every rank, from rank 0."""
        cut = None if factors is None else factors.leading(rank)
        tensors: dict[str, Any] = {
            key: from_main(None if cut is None else getattr(cut, key), each, torch.float32, self.world).cpu()
            for key, each in WEIGHTED_KINDS["svd"].tensors(shape, rank).items()
        }
        return WeightedSVD(**tensors, energy=0.0, scale=0.0, tokens=0)

    def _moments(self, owners: Mapping[str, int], rounds: int) -> dict[str, Moments]:
        """The moments of the linears that this rank decomposes, over the data of all ranks."""
        world = self.world

        def reduce(tensor: Tensor, name: str | None) -> bool:
            if name is None:
                all_reduce_sum(tensor)
                return True
            sum_at(tensor, owners[name], world)
            return owners[name] == world.rank

        def measure() -> dict[str, Moments]:
            return measure_moments(
                self.model,
                list(owners),
                self.batches,
                gradients=self.gradients,
                seed=self.settings.seed,
                reduce=reduce if world.size > 1 else None,
                rounds=rounds,
            )

        return on_every(measure, world)

    def _decomposed(
        self, owners: Mapping[str, int], wanted: Mapping[str, Size], moments: dict[str, Moments]
    ) -> dict[str, Any]:
        """The factors of this rank's matrices; the ranks gather each matrix together if it is sharded."""
        model, weights = self.model, dict[str, Tensor]()
        for name in owners:
            linear = model.get_submodule(name)
            parameter = cast(Tensor, linear.weight)
            with gathered(parameter):
                if name in moments:
                    weight = matrix(linear).detach()
                    weights[name] = weight.clone() if hasattr(parameter, "ds_id") else weight

        def decompose() -> dict[str, Any]:
            found, kind = {}, WEIGHTED_KINDS[self.method]
            for name in list(moments):
                weight = weights.pop(name)
                moved = weight if self.device is None else weight.to(self.device)
                found[name] = kind.decompose(moved, moments.pop(name), wanted[name]).to(torch.device("cpu"))
            return found

        return on_every(decompose, self.world)

    def _brought(self, factors: Any, shape: Shape, size: Size, owner: int) -> Any:
        """The factors of a matrix on rank 0, None on the others."""
        kind, world = WEIGHTED_KINDS[self.method], self.world
        brought = {
            key: to_main(None if factors is None else getattr(factors, key), each, torch.float32, owner, world)
            for key, each in kind.tensors(shape, size).items()
        }
        keys = (*kind.figures, "tokens")
        own = None if factors is None else torch.tensor([getattr(factors, key) for key in keys], dtype=torch.float64)
        figures = to_main(own, (len(keys),), torch.float64, owner, world)
        if figures is None:
            return None
        *values, tokens = figures.tolist()
        return kind.factors(**brought, **dict(zip(kind.figures, values, strict=True)), tokens=int(tokens))

    def table(self, rank: int) -> WeightedTable | None:
        """Measure and decompose the token embedding in a pass of its own; on rank 0, None on the others.

        Every rank must call this function.

        Raises:
            UserError: the data have no token or give numbers that are not finite.
        """
        model, world = self.model, self.world
        rounds = largest_number(len(self.batches), world)

        def measure() -> TableMoments:
            return measure_table(
                model,
                self.batches,
                gradients=self.gradients,
                seed=self.settings.seed,
                reduce=all_reduce_sum if world.size > 1 else None,
                rounds=rounds,
            )

        moments = on_every(measure, world)
        parameter = token_embedding(model)[1].weight

        def decompose() -> WeightedTable | None:
            if not world.is_main:
                return None
            table = parameter.detach()
            return weighted_table(table if self.device is None else table.to(self.device), moments, rank)

        with gathered(parameter):
            return on_every(decompose, world)


def plan_passes(
    groups: Sequence[Sequence[str]], shapes: Mapping[str, Shape], *, gradients: bool, memory: float
) -> list[Pass]:
    """Split groups of linears, in their order, into passes whose moments in fp32 fit into `memory` GiB.

    The linears of a group share the moment of their inputs; if a pass has no room for all of them, the next one
    measures it again. A linear that alone does not fit has a pass of its own.
    """
    passes: list[Pass] = []
    for group in groups:
        begun = False  # whether the last pass has a part of this group
        for name in group:
            m, n = shapes[name]
            of_inputs, of_outputs = 4 * n * n, 4 * m * m if gradients else 0
            size = of_outputs + (0 if begun else of_inputs)
            if not passes or passes[-1].bytes + size > memory * GIB:
                passes.append(Pass([[name]], of_inputs + of_outputs))
            elif begun:
                *others, part = passes[-1].groups
                passes[-1] = Pass([*others, [*part, name]], passes[-1].bytes + size)
            else:
                passes[-1] = Pass([*passes[-1].groups, [name]], passes[-1].bytes + size)
            begun = True
    return passes


def deal(groups: Sequence[Sequence[str]], shapes: Mapping[str, Shape], ranks: int) -> dict[str, int]:
    """Return the rank that decomposes each linear, so that all have about the same work; a group stays together.

    The work is m·n·min(m, n). The largest group comes first, each to the rank that has least to do.
    """
    work = {
        number: sum(m * n * min(m, n) for m, n in (shapes[name] for name in group))
        for number, group in enumerate(groups)
    }
    loads, owners = [0] * ranks, dict[str, int]()
    for number in sorted(work, key=lambda number: -work[number]):
        rank = loads.index(min(loads))
        loads[rank] += work[number]
        owners |= dict.fromkeys(groups[number], rank)
    return owners


def _cut_sizes(found: Weighted) -> tuple[dict[str, int], dict[str, Shape]]:
    return dict(found.ranks), {name: found.factors[name].shape for name in found.ranks}
