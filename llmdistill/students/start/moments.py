"""Measures the inputs of a model's linears, and how strongly the loss depends on their outputs.

For each linear these are the second moments C = Σ x xᵀ of its inputs and G = Σ g gᵀ of the gradients at its outputs,
summed over tokens. C ⊗ G / tokens is the Kronecker-factored Fisher matrix of the linear's weight (K-FAC), so that a
change ΔW costs about Σ tr(ΔWᵀ G ΔW C) / (2 tokens) of the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.step.passes import HookSums, Passes, are_nonzero, hook_gradient
from llmdistill.students.install import features
from llmdistill.students.start.sampled import USUAL, Reads, Sampling, identity, run_sampled
from llmdistill.students.start.table_moments import TableMoments, TableSums


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The second moments of one linear, summed over tokens."""

    inputs: Tensor
    """(n, n), Σ x xᵀ; linears that read the same tensors share it."""
    gradients: Tensor | None
    """(m, m), Σ g gᵀ; None if no gradients were measured."""
    tokens: int
    """The number of tokens."""


@dataclass(frozen=True)
class PartialSums:
    """The state of a measurement: the sums so far."""

    done: int = 0
    """The number of passes."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """The number of tokens, the lower triangles of the moments, by keys such as "inputs NAME", and the sums of a
    `TableSums`, such as "table counts"."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The linear that first reads the tensors that a linear reads."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where a measurement that was interrupted goes on, and how it is saved."""

    resumed: PartialSums | None = None
    """The sums of an earlier call with the same arguments that was interrupted."""
    after: Callable[[int, int, Callable[[], PartialSums]], object] = lambda done, total, sums: None
    """Called after each pass with the number of passes that are done, the number of all, and a function that returns
    the sums so far."""


NOT_SAVED = Saving()


def measure_moments(
    model: PreTrainedModel,
    names: Collection[str],
    batches: Iterable[Batch],
    sampling: Sampling = USUAL,
    *,
    reduce: Callable[[Tensor, str | None], bool] | None = None,
    saving: Saving = NOT_SAVED,
    keep_table: Callable[[TableMoments], object] | None = None,
) -> dict[str, Moments]:
    """Return the second moments of some linears over the real tokens of batches, in fp32 whatever the model's dtype.

    Linears that get no input or no gradient are left out, such as one whose weight the model reads itself.

    The gradients are those of the log-likelihood of labels that are sampled from the model's own output, so they
    measure the true Fisher matrix: for a language model one label at each token, for a classifier one class for each
    sequence. A model without a head uses random signs on its last hidden states (the Gauss-Newton matrix). The random
    numbers of a sample follow from its id, so they do not depend on ranks and batches.

    Args:
        model: the model, whose mode and weights stay as they are.
        names: names of nn.Linear or Conv1D modules in the model.
        batches: the batches of this rank, on any device; each rank needs at least one.
        sampling: whether G is measured, the labels, and what the linears read.
        reduce: sums a tensor of the linear with this name over the ranks, in place, and returns whether this rank needs
            the sum; only its moments are then returned. What has no name, the number of tokens and the sums for the
            token embedding, every rank gets.
        saving: where the measurement goes on, and how it is saved.
        keep_table: takes the moments of the token embedding, which are then measured in the same passes.

    Raises:
        UserError: there is no token, or a moment is not finite.
    """
    resumed = saving.resumed or PartialSums()
    passes = Passes(
        rounds=sampling.rounds,
        done=resumed.done,
        after=lambda sums, done, total: saving.after(done, total, lambda: sums.so_far(done)),
    )
    make = partial(_Sums, model, names, sampling.gradients, resumed, keep_table is not None)
    sums = run_sampled(model, names, batches, make, sampling, passes)
    moments, table = sums.moments(reduce)
    if keep_table is not None and table is not None:
        keep_table(table)
    return moments


class _Sums(HookSums):
    """Adds up the moments of linears in forward and backward hooks."""

    def __init__(
        self,
        model: PreTrainedModel,
        names: Collection[str],
        gradients: bool,
        resumed: PartialSums,
        with_table: bool,
        reads: Reads | None,
    ) -> None:
        super().__init__(model.device)
        # q, k and v, or gate and up, read one tensor one after the other: their C is summed once.
        self._read: deque[tuple[Tensor, str]] = deque(maxlen=2)
        """The last tensors that linears read, each with the linear that read it first: no more are kept alive."""
        known = {key: tensor.to(model.device) for key, tensor in resumed.sums.items()}
        # What is left are the moments, each under its kind and the name of its linear.
        self.tokens = known.pop("tokens", self.tokens)
        self._inputs, self._gradients, of_table = (
            {key.partition(" ")[2]: tensor for key, tensor in known.items() if key.startswith(kind)}
            for kind in ("inputs", "gradients" if gradients else "none", "table")
        )
        self._has_gradients = gradients
        self._shapes = {name: features(model.get_submodule(name)) for name in names}
        groups = [] if reads is None else reads.groups
        self._source = {name: group[0] for group in groups for name in group} | dict(resumed.sources)
        """The linear that first reads what a linear reads."""
        run = partial(self._add_call, gradients)
        self.handles = [model.get_submodule(name).register_forward_hook(partial(run, name)) for name in names]
        self._table = TableSums(model, gradients, self) if with_table else None
        if self._table is not None and of_table:
            self._table.resume(of_table)

    def add_probabilities(self, p_NV: Tensor) -> None:
        if self._table is not None:
            self._table.add_probabilities(p_NV)

    def so_far(self, done: int) -> PartialSums:
        table = {} if self._table is None else self._table.sums
        kinds = (("inputs", self._inputs), ("gradients", self._gradients), ("table", table))
        sums = {f"{kind} {name}": moment for kind, moments in kinds for name, moment in moments.items()}
        return PartialSums(done, {"tokens": self.tokens, **sums}, self._source)

    def moments(
        self, reduce: Callable[[Tensor, str | None], bool] | None
    ) -> tuple[dict[str, Moments], TableMoments | None]:
        """Return the sums over all ranks that this rank needs, of the linears that got inputs and gradients at all."""
        if reduce is not None:
            for tensor in (self.tokens, *(() if self._table is None else self._table.sums.values())):
                reduce(tensor, None)
            self._reduce(
                self._inputs, {self._source.get(name, name): n for name, (_, n) in self._shapes.items()}, reduce
            )
            if self._has_gradients:
                self._reduce(self._gradients, {name: m for name, (m, _) in self._shapes.items()}, reduce)
        for lower in (*self._inputs.values(), *self._gradients.values()):
            # The blocks on the diagonal are whole already; what is right of them mirrors what is below.
            block = _block(lower.device)
            for start in range(0, len(lower) - block, block):
                here, below = slice(start, start + block), slice(start + block, None)
                lower[here, below] = lower[below, here].T
        # No entry of Σ x xᵀ is larger than the largest of its diagonal, where none is negative.
        traces = [
            {name: moment.diagonal().sum(dtype=torch.float64) for name, moment in sums.items()}
            for sums in (self._inputs, self._gradients)
        ]
        named = [(f"the inputs or gradients of {name}", trace) for of_kind in traces for name, trace in of_kind.items()]
        tokens = self.count_tokens([*named, *(() if self._table is None else self._table.totals())])
        # A moment of zeros is that of a linear that never ran in these data, or whose output the loss does not read.
        inputs, gradients = (
            dict(compress(sums.items(), are_nonzero(list(of_kind.values()))))
            for sums, of_kind in zip((self._inputs, self._gradients), traces, strict=True)
        )
        moments = {
            name: Moments(inputs=inputs[source], gradients=gradients.get(name), tokens=tokens)
            for name, source in self._source.items()
            if source in inputs and (name in gradients or not self._has_gradients)
        }
        return moments, None if self._table is None else self._table.moments(tokens)

    def _reduce(
        self, sums: dict[str, Tensor], widths: Mapping[str, int], reduce: Callable[[Tensor, str | None], bool]
    ) -> None:
        for name, width in widths.items():
            if name not in sums:  # such as an expert that no token of this rank was routed to
                sums[name] = torch.zeros(width, width, device=self.tokens.device)
            if not reduce(sums[name], name):
                del sums[name]

    def _add_call(
        self, gradients: bool, name: str, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        # The first run of a layer has counted its inputs, and its graph is the one that the gradients come through.
        counts = self.phase != "recompute"
        if counts:
            self.check(name, inputs[0])
            if name not in self._source:
                same = (first for tensor, first in self._read if identity(tensor) == identity(inputs[0]))
                self._source[name] = next(same, name)
            # Of linears that read the same tensor only the first adds it up.
            if self._source[name] == name:
                self._read.append(
                    (inputs[0].detach(), name)
                )  # without detach the graph would hold this object through its hooks
                _add_outer_products(self._inputs, name, self.rows(inputs[0]))
        if not gradients:
            return None
        # The graph begins at the first linear that is measured, as no weight requires a gradient: the layers below it
        # take no part in the backward pass.
        # A layer that runs again must build the same graph as before, so it gets its hook too.
        return hook_gradient(
            output,
            (lambda gradient: _add_outer_products(self._gradients, name, self.rows(gradient))) if counts else None,
        )


BLOCK, GPU_BLOCK = 256, 4096
"""Rows of a moment that are added up at a time, each up to its diagonal: the other half is the same. On a GPU starting
a small product takes longer than the half that it saves."""


def _block(device: torch.device) -> int:
    return BLOCK if device.type == "cpu" else GPU_BLOCK


def _add_outer_products(sums: dict[str, Tensor], name: str, rows_NK: Tensor) -> None:
    """Add Σ x xᵀ to the lower triangle; `_Sums.moments` copies it to the upper one."""
    # Squares of 16-bit numbers overflow (fp16), or are lost beside the sum (bf16).
    rows = rows_NK.float()
    width = rows.shape[1]
    if name not in sums:
        sums[name] = rows.new_zeros(width, width)
    block = _block(rows.device)
    if width <= block:
        sums[name].addmm_(rows.T, rows)
        return
    for end in range(block, width + block, block):
        here = slice(end - block, end)
        # (block, end): rows of the moment up to their own columns
        sums[name][here, :end].addmm_(rows[:, here].T, rows[:, :end])
