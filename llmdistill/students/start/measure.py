"""Measures the moments of a teacher in passes that fit into memory, and decomposes its matrices on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig
from llmdistill.models.families import is_causal
from llmdistill.models.sharded import gathered
from llmdistill.progress import Activity
from llmdistill.runtime.devices import give_back_memory
from llmdistill.runtime.distributed import (
    World,
    all_reduce_sum,
    broadcast_object,
    largest_number,
    on_every,
    sum_at,
    to_main,
)
from llmdistill.step.passes import split_batches
from llmdistill.students.counting import Shape, layer_linears
from llmdistill.students.install import matrix, token_embedding
from llmdistill.students.kinds import Size
from llmdistill.students.start.calibration_folder import read_sums, write_sums
from llmdistill.students.start.cuts import predict_losses
from llmdistill.students.start.moments import NOT_SAVED, Moments, PartialSums, Saving, measure_moments
from llmdistill.students.start.sampled import Reads, Sampling, watch_reads
from llmdistill.students.start.table_moments import TableMoments, measure_table
from llmdistill.students.start.weighted import WeightedSVD, weighted_svds
from llmdistill.students.start.weighted_embedding import WeightedTable
from llmdistill.students.start.weighted_kronecker import weighted_kronecker

GIB = 2**30
# Whole texts of 512 tokens told no better which of two rankings is nearer to the teacher, at four times the price.
LOSS_SHARE, LOSS_EXAMPLES, LOSS_TOKENS = 8, 64, 128
"""The loss of a lower rank is predicted from one in LOSS_SHARE examples, but from LOSS_EXAMPLES at least, and for a
decoder from the first LOSS_TOKENS tokens of each (`first_tokens`)."""
KEEP_SECONDS = 120
"""The time between two saves of the sums of a pass."""
DECOMPOSE: dict[str, Callable[[Sequence[Tensor], Sequence[Moments], Sequence[Any]], Sequence[Any]]] = {
    "svd": weighted_svds,
    "kronecker": lambda *matrices: list(map(weighted_kronecker, *matrices)),
}
"""(weights (m, n) of one shape, moments, ranks or shapes) -> the weighted factors, by the method of the
factorization."""
_CPU = torch.device("cpu")
_OTHER_LABELS = 2**31
"""Added to the seed of the labels, so that a cut is judged by other labels than those that it was fitted to."""


@dataclass
class Pass:
    """The linears that are measured in one pass over the data."""

    groups: list[list[str]] = field(default_factory=list)
    """Names of linears; those of a group read the same tensor."""
    bytes: int = 0
    """Memory of their moments in fp32."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The data on which the factors of a teacher's matrices are measured, and the method."""

    model: PreTrainedModel
    """The dense teacher, whole or sharded by ZeRO-3."""
    batches: Sequence[Batch]
    """This rank's calibration data, at least one batch."""
    settings: CalibrationConfig
    """Seed and memory."""
    gradients: bool
    """Whether G is measured."""
    method: str = "svd"
    """The method of the factorization."""
    device: torch.device | None = None
    """The device on which matrices are decomposed, one at a time; by default that of each matrix."""

    @cached_property
    def _reads(self) -> Reads:
        reads = watch_reads(self.model, layer_linears(self.model), self.batches)
        # Each rank has other data, which may choose other experts; all must plan the same passes.
        return reads if World.current().size == 1 else cast(Reads, broadcast_object(reads))

    @cached_property
    def _parts(self) -> Sequence[Batch]:
        """The batches, split into single sequences for a model that needs them; the ranks make as many passes."""
        return self.batches if self._reads.in_order else split_batches(self.batches, 1)

    def factors(
        self,
        shapes: Mapping[str, Shape],
        wanted: Mapping[str, Size],
        keep: Callable[[str, Any, float], object],
        say: Callable[[str], object],
        known: Collection[str] = (),
        keep_table: Callable[[TableMoments], object] | None = None,
    ) -> None:
        """Measure and decompose matrices; every rank must call this function.

        The matrices of a pass are dealt to the ranks. The sums over the ranks go to the rank that decomposes the
        matrix, and the factors go to rank 0, one matrix after the other.

        Args:
            shapes: (m, n) of the matrices, by their names in the base model.
            wanted: the number of leading factors to return, or the Kronecker shape, by the same names.
            keep: takes the name of a matrix, its factors and its share of the seconds of a pass, on rank 0, as soon as
                the pass has ended.
            say: takes the plan as a sentence.
            known: the matrices of `wanted` that have factors already.
            keep_table: takes the moments of the token embedding on every rank, which are then measured too, in the
                first pass.

        Raises:
            UserError: the data have no token or give numbers that are not finite.
        """
        model, world = self.model, World.current()
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        sizes = {prefix + name: shapes[name] for name in wanted}
        wanted = {prefix + name: size for name, size in wanted.items()}
        groups = self._reads.of(sizes).groups
        # Saved sums come from the same passes for every weighting, so that a later run with another one can use them.
        gradients = self.gradients or self.settings.folder is not None
        passes = plan_passes(groups, sizes, gradients=gradients, memory=self.settings.memory)
        most, plural = max(part.bytes for part in passes) / GIB, "" if len(passes) == 1 else "es"
        say(f"{len(passes)} pass{plural} of at most {most:.3g} GiB of statistics")
        # Every rank makes as many passes as the one with the most batches, see `Sampling.rounds`.
        rounds = largest_number(len(self._parts))
        for number, part in enumerate(passes):
            began = time.perf_counter()
            owners = deal(part.groups, sizes, world.size)
            missing = {name for name in owners if name.removeprefix(prefix) not in known}
            if not missing:
                continue
            # All linears of a pass are measured, also known ones: saved sums belong to a pass, not to a linear.
            moments = self._measure_moments(owners, rounds, f"{number + 1}-of-{len(passes)}", keep_table)
            keep_table = None
            owners = {name: owner for name, owner in owners.items() if name in missing}
            moments = {name: moment for name, moment in moments.items() if name in missing}
            decomposed = self._decompose(owners, wanted, moments)
            share = (time.perf_counter() - began) / len(owners)
            for name, owner in owners.items():
                # One at a time: rank 0 keeps it, mostly on the disk, before the next one arrives.
                factors = to_main(decomposed.pop(name, None), owner)
                if factors is not None:
                    keep(name.removeprefix(prefix), factors, share)

    def predict_losses(self, factors: Mapping[str, WeightedSVD], names: Collection[str]) -> dict[str, Tensor]:
        """Return the result of `cuts.predict_losses` for matrices with factors on rank 0; every rank must call this.

        Names without factors are left out: the data gave these matrices no input or no gradient.

        A part of the data is enough, because the loss of a rank is a single number, unlike the moments. It is a mean of
        squares with one square per sequence, so many short sequences tell more than a few long ones.
        """
        world, rows = World.current(), World.current().size * sum(len(batch.input_ids) for batch in self._parts)
        share = max(LOSS_EXAMPLES, rows // LOSS_SHARE) / rows
        batches = first_tokens(self.model, self._parts[: math.ceil(share * len(self._parts))])
        measured: dict[str, Any] = {name: factors.get(name) for name in names}
        # One rank of a group may measure alone, without the process group. The names are the same on every rank, and
        # one broadcast a matrix keeps the memory that it takes small.
        if world.size > 1:
            measured = {name: broadcast_object(svd) for name, svd in measured.items()}
        return predict_losses(
            self.model,
            {name: svd for name, svd in measured.items() if svd is not None},
            batches,
            Sampling(seed=self.settings.seed + _OTHER_LABELS, reads=self._reads, rounds=largest_number(len(batches))),
            reduce=all_reduce_sum if world.size > 1 else None,
        )

    def _measure_moments(
        self,
        owners: Mapping[str, int],
        rounds: int,
        number: str,
        keep_table: Callable[[TableMoments], object] | None,
    ) -> dict[str, Moments]:
        """Measure the moments of the linears that this rank decomposes, over the data of all ranks."""
        world = World.current()

        def reduce(tensor: Tensor, name: str | None) -> bool:
            if name is None:
                all_reduce_sum(tensor)
                return True
            sum_at(tensor, owners[name])
            return owners[name] == world.rank

        sampling = Sampling(
            gradients=self.gradients, seed=self.settings.seed, reads=self._reads.of(owners), rounds=rounds
        )
        saving = self._resume_sums(list(owners), number, table=keep_table is not None)
        measure = partial(
            measure_moments,
            self.model,
            list(owners),
            self._parts,
            sampling,
            reduce=reduce if world.size > 1 else None,
            saving=saving,
            keep_table=keep_table,
        )
        return on_every(measure)

    def _resume_sums(self, names: list[str], number: str, *, table: bool) -> Saving:
        """Read the sums of a pass that an earlier process has saved, and save those of this one now and then.

        All ranks save after the same batches. If a kill came between their saves, the pass starts again.
        """
        if self.settings.folder is None:
            return NOT_SAVED
        world, folder = World.current(), Path(self.settings.folder) / "sums"
        file = folder / f"pass-{number}-rank-{world.rank + 1}-of-{world.size}.safetensors"
        began = time.monotonic()
        resumed = on_every(partial(read_sums, file, names, gradients=self.gradients, table=table))
        # The smallest number is minus the largest of the negatives.
        same = largest_number(resumed.done) == -largest_number(-resumed.done)
        every: int | None = None

        def after(done: int, total: int, sums: Callable[[], PartialSums]) -> None:
            nonlocal every
            if every is None:  # the time of the first batch says how many batches take KEEP_SECONDS
                every = largest_number(1 + int(KEEP_SECONDS / (time.monotonic() - began)))
            if done % every == 0 or done == total:
                write_sums(file, names, sums(), gradients=self.gradients)

        return Saving(resumed=resumed if same else None, after=after)

    def _decompose(
        self, owners: Mapping[str, int], wanted: Mapping[str, Size], moments: dict[str, Moments]
    ) -> dict[str, Any]:
        """Return the factors of this rank's matrices; the ranks gather each matrix together if it is sharded."""
        model, weights = self.model, dict[str, Tensor]()
        for name in owners:
            linear = model.get_submodule(name)
            parameter = cast(Tensor, linear.weight)
            # Gathering is a collective: every rank enters it for every matrix, although one of them keeps it.
            with gathered(parameter):
                if name in moments:
                    weight = matrix(linear).detach()
                    # The gathered weight of a ZeRO-3 parameter is freed at the end of the block.
                    weights[name] = weight.clone() if hasattr(parameter, "ds_id") else weight

        def decompose() -> dict[str, Any]:
            decomposed = dict[str, Any]()
            if not moments:
                return {}
            device = next(iter(weights.values())).device if self.device is None else self.device
            parts = together(weights, device) if self.method == "svd" else [[name] for name in weights]

            def run(names: list[str]) -> None:
                # Out of the dicts, so that matrices and their moments are freed when they are decomposed.
                moved, own = [weights.pop(name).to(device) for name in names], [moments.pop(name) for name in names]
                factors = DECOMPOSE[self.method](moved, own, [wanted[name] for name in names])
                # On the CPU, as the factors of all matrices together may be larger than the model.
                decomposed.update(
                    {name: factors_of_one.to(_CPU) for name, factors_of_one in zip(names, factors, strict=True)}
                )
                if device.type == "cpu":
                    give_back_memory()

            names = list(moments)
            in_threads(run, parts, workers(weights, model) if device.type == "cpu" else 1)
            return {name: decomposed[name] for name in names}

        return on_every(decompose)

    def table_moments(self) -> TableMoments:
        """Measure the token embedding in passes of its own; every rank must call this function.

        Raises:
            UserError: the data have no token or give numbers that are not finite.
        """
        measure = partial(
            measure_table,
            self.model,
            self._parts,
            Sampling(gradients=self.gradients, seed=self.settings.seed, rounds=largest_number(len(self._parts))),
            reduce=all_reduce_sum if World.current().size > 1 else None,
        )
        return on_every(measure)

    def table(self, decompose: Callable[[Tensor], WeightedTable]) -> WeightedTable | None:
        """Return what a function makes of the token embedding's table, on rank 0; None on the others.

        Every rank must call this function.
        """
        parameter = token_embedding(self.model)[1].weight

        def run() -> WeightedTable | None:
            if not World.current().is_main:
                return None
            table = parameter.detach()
            return decompose(table if self.device is None else table.to(self.device))

        with gathered(parameter):
            return on_every(run)


def together(weights: Mapping[str, Tensor], device: torch.device) -> list[list[str]]:
    """Return the names of matrices that are decomposed in one call: on a GPU those of a shape, as its memory allows."""
    if device.type == "cpu":
        return [[name] for name in weights]
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, weight in weights.items():
        groups.setdefault(tuple(weight.shape), []).append(name)
    parts = []
    for (m, n), names in groups.items():
        size = max(1, torch.cuda.mem_get_info(device)[0] // 2 // working_bytes(m, n))
        parts += [names[start : start + size] for start in range(0, len(names), size)]
    return parts


def working_bytes(m: int, n: int) -> int:
    """Return about how much memory the decomposition of an (m, n) matrix takes: copies in fp64, and eigenvectors."""
    return 8 * (3 * (m * m + n * n) + 4 * m * n)


def workers(weights: Mapping[str, Tensor], model: PreTrainedModel) -> int:
    """Return the number of matrices that a CPU decomposes at a time, in about half of the teacher's memory in fp32."""
    room = 2 * sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())
    largest = max((working_bytes(*weight.shape) for weight in weights.values()), default=1)
    return max(1, min(torch.get_num_threads(), room // largest))


def in_threads(run: Callable[[list[str]], object], parts: Sequence[list[str]], count: int) -> None:
    """Call a function for each part, `count` at a time, with the threads of torch divided among them.

    Of a matrix of a few hundred rows several threads wait for each other longer than they work.
    """
    threads, total = torch.get_num_threads(), sum(map(len, parts))
    own = partial(torch.set_num_threads, max(1, threads // count))
    own()  # new threads have the number of this one, and some libraries a number for all
    try:
        with Activity("Decomposing", total, "matrices") as activity, ThreadPoolExecutor(count, initializer=own) as pool:
            for part, _ in zip(parts, pool.map(run, parts), strict=True):
                activity.advance(len(part))
    finally:
        torch.set_num_threads(threads)


def first_tokens(model: PreTrainedModel, batches: Sequence[Batch]) -> Sequence[Batch]:
    """Return the first LOSS_TOKENS tokens of each row for a decoder, where they know nothing of the others."""
    return [batch.select(slice(None), LOSS_TOKENS) for batch in batches] if is_causal(model.config) else batches


def plan_passes(
    groups: Sequence[Sequence[str]], shapes: Mapping[str, Shape], *, gradients: bool, memory: float
) -> list[Pass]:
    """Split groups of linears, in their order, into passes whose moments in fp32 fit into `memory` GiB.

    The linears of a group share the moment of their inputs; if a pass has no room for all of them, the next one
    measures it again. A linear that alone does not fit has a pass of its own.
    """
    passes: list[Pass] = []
    for group in groups:
        part: list[str] = []  # of this group in the last pass
        for name in group:
            m, n = shapes[name]
            input_bytes, output_bytes = 4 * n * n, 4 * m * m if gradients else 0
            # The linears of a group after the first add no moment of inputs.
            size = output_bytes if part else input_bytes + output_bytes
            if not passes or passes[-1].bytes + size > memory * GIB:
                passes.append(Pass())
                part, size = [], input_bytes + output_bytes
            if not part:
                passes[-1].groups.append(part)
            part.append(name)
            passes[-1].bytes += size
    return passes


def deal(groups: Sequence[Sequence[str]], shapes: Mapping[str, Shape], ranks: int) -> dict[str, int]:
    """Return the rank that decomposes each linear, so that all have about the same work; a group stays together.

    The work is m·n·min(m, n). From the largest group on, each goes to the rank with the least work so far.
    """

    def work(group: Sequence[str]) -> int:
        return sum(m * n * min(m, n) for m, n in (shapes[name] for name in group))

    loads, owners = [0] * ranks, dict[str, int]()
    for group in sorted(groups, key=work, reverse=True):  # small groups last, as they level the loads
        rank = loads.index(min(loads))
        loads[rank] += work(group)
        owners |= dict.fromkeys(group, rank)
    return owners
