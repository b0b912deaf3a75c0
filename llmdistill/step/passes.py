"""Runs a model over calibration data while hooks add up what its modules read, return and get as gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.internals.torch_names import is_view
from llmdistill.models.families import is_causal
from llmdistill.progress import Activity


class OddReadError(Exception):
    """A module reads something of which one pass cannot say whether it is the tokens of the batch."""


def hook_gradient(output: Tensor, receive: Callable[[Tensor], None] | None) -> Tensor:
    """Return the output of a module for a forward hook to hand on; `receive` gets its gradient in the backward pass.

    The gradient is that of what the module returned, also if the model changes the tensor in place afterwards. No
    weight needs to require a gradient: the graph begins here at the latest.
    """
    if output.requires_grad and (receive is None or not is_view(output)):
        if receive is not None:
            output.register_hook(receive)
        return output
    return cast(Tensor, _Graded.apply(output, _BEGIN, receive))


_BEGIN = torch.empty(0, requires_grad=True)
"""Requires a gradient, and never gets one."""


class _Graded(torch.autograd.Function):
    """The same values in the same memory, where a hook on the tensor is not enough.

    torch forgets the hook of a view (what a linear with a bias returns) that is changed in place, and does not let a
    tensor be changed at which the graph begins.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, _begin: Tensor, receive: Callable[[Tensor], None] | None) -> Tensor:
        ctx.receive = receive
        # An input that is returned as it is becomes a view, which must not be changed in place.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        receive, ctx.receive = ctx.receive, None  # frees the tensors that the function holds before the graph is freed
        if receive is not None:
            receive(gradient)
        return gradient, None, None  # _BEGIN and the function have none


class HookSums:
    """Adds up values over the real tokens of batches; a subclass registers the hooks that do so in `handles`."""

    def __init__(self, device: torch.device) -> None:
        """Count tokens on the device of the model."""
        self.handles: list[RemovableHandle] = []
        self.mask = torch.empty(0)
        """(B, T), the positions of the pass that count."""
        self._places_N = torch.empty(0, dtype=torch.long)
        """As above, as indices of the rows (B T)."""
        # fp64 counts exactly up to 2^53; fp32 would stop at 17 million tokens.
        self.tokens = torch.zeros((), dtype=torch.float64, device=device)
        """The number of tokens so far."""
        self.phase: Literal["store", "drop", "recompute"] = "store"
        """Whether the layer that runs stores its tensors for the backward pass, drops them, or computes them again."""
        self.calls: deque[Any] = deque()
        """The records of a subclass on the calls of a layer, from its first run to the one in the backward pass."""
        self.is_known = False
        """Whether it is known which rows the modules read; if not, a module must read (B, T, K), once in a pass."""
        self._called = set[str]()

    def count(self, mask_BT: Tensor) -> None:
        """Let the next pass be added up at the positions of the mask, on any device; padding is left out."""
        self._called.clear()
        # A GPU is asked once a pass, not at each linear, and not at all if the mask comes from the host.
        self._is_whole = bool(mask_BT.all())
        # A copy that is waited for would wait for all that the last pass has queued.
        self._places_N = mask_BT.flatten().nonzero()[:, 0].to(self.tokens.device, non_blocking=True)
        self.mask = mask_BT.to(self.tokens.device, non_blocking=True)
        self.tokens += len(self._places_N)

    def check(self, name: str, values: Tensor) -> None:
        """Check the inputs of a module in a call (B, T, K).

        Raises:
            OddReadError: it may be something else than the tokens, in their order, and nothing else is known of it.
        """
        if not self.is_known:
            is_plain = values.dim() == 3 and values.shape[:2] == self.mask.shape
            rows, length = self.mask.shape
            # The shape does not tell: as many rows as columns may be transposed, and the tokens of one row may be in
            # another order, which matters only if some of them do not count.
            if name in self._called or not is_plain or not (1 < rows != length or (rows == 1 and self._is_whole)):
                raise OddReadError(name)
            self._called.add(name)

    def rows(self, values: Tensor) -> Tensor:
        """Return the values (..., K) of a call of a module as rows (N, K), those that count.

        Rows that are not the batch's tokens all count, such as those of relative positions.

        Raises:
            UserError: there is padding, and nothing says which of the rows it is.
        """
        rows_NK = values.detach().reshape(-1, values.shape[-1])
        if self._is_whole:
            return rows_NK
        if len(rows_NK) == self.mask.numel():
            return rows_NK.index_select(0, self._places_N)
        self._check_odd()
        return rows_NK[:0]

    def sum_by_sequence(self, values: Tensor) -> Tensor:
        """Add up the values (..., K) of a call over the rows that count of each sequence: (B, K).

        Raises:
            UserError: nothing says which of the rows belong to which sequence, or which are padding.
        """
        mask_BT, width = self.mask, values.shape[-1]
        if values.numel() == mask_BT.numel() * width:
            own_BTK = values.reshape(*mask_BT.shape, width)
            return (own_BTK if self._is_whole else own_BTK * mask_BT[..., None]).sum(1)
        # All rows belong to the one sequence, in whatever order they are.
        if self._is_whole and len(mask_BT) == 1:
            return values.reshape(1, -1, width).sum(1)
        self._check_odd()
        return values.new_zeros(len(mask_BT), width)

    def _check_odd(self) -> None:
        # A batch that is repeated for the sake of other ranks counts nothing, whatever its rows are.
        if len(self._places_N):
            raise UserError(
                "a linear reads other rows than the tokens of a batch, so that padding cannot be told from them: set "
                "student.factorize.calibration.micro_batch_size to 1"
            )

    def finish(self) -> None:
        """Finish a pass; does nothing by default."""

    def add_probabilities(self, p_NV: Tensor) -> None:
        """Add the probabilities of some rows that count, in the passes with gradients; does nothing by default."""

    @contextmanager
    def during(self, phase: Literal["drop", "recompute"], calls: deque[Any]) -> Iterator[None]:
        """Within this block a layer runs whose tensors are dropped, or computed again; both runs share `calls`.

        A layer that the model runs several times has separate `calls` for each run.
        """
        self.phase, self.calls = phase, calls
        try:
            yield
        finally:
            self.phase = "store"

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def count_tokens(self, sums: Iterable[tuple[str, Tensor]]) -> int:
        """Return the number of tokens.

        Args:
            sums: pairs of a name, as a user would call it, and the total () of the sums of that name, in fp64: it is
                not finite if one of them is not, and does not overflow.

        Raises:
            UserError: there is no token, or a sum is not finite.
        """
        if not self.tokens > 0:
            raise UserError("the calibration data hold no token: name data with at least one example")
        named = list(sums)
        finite = torch.stack([total for _, total in named]).isfinite().tolist() if named else []
        for (name, _), is_finite in zip(named, finite, strict=True):
            if not is_finite:
                raise UserError(
                    f"{name} are not finite on the calibration data: name other data, load the model as fp32, "
                    "or copy or download it again if its weights are not"
                )
        return int(self.tokens)


def are_nonzero(flags: list[Tensor]) -> list[bool]:
    """Return whether each of some numbers () is not zero, for which a GPU is asked once."""
    return list(map(bool, torch.stack(flags).tolist())) if flags else []


def split_batches(batches: Iterable[Batch], tokens: int) -> list[Batch]:
    """Split the rows into parts of at most so many tokens, padding included; a longer row is a part of its own.

    The number of parts follows from the shape of each batch.
    """
    parts = []
    for batch in batches:
        rows, length = batch.input_ids.shape
        rows_per_part = max(1, tokens // length)
        parts += [batch.select(slice(start, start + rows_per_part)) for start in range(0, rows, rows_per_part)]
    return parts


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The number of passes that a model makes over batches, and how they are reported."""

    rounds: int = 0
    """The smallest number of passes; a rank with fewer batches repeats its own without counting them, because the ranks
    of a sharded model need each other in every pass."""
    done: int = 0
    """The number of passes that the sums have counted already."""
    what: str = "Calibrating"
    """The name of this work in its bar and lines."""
    after: Callable[[Any, int, int], object] = lambda sums, done, total: None
    """Called after each pass with the sums, the number of passes so far, and the number of all."""


def run_passes(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    sums: HookSums,
    step: Callable[[Batch], object],
    passes: Passes,
) -> None:
    """Run a model in evaluation mode over batches while `sums` counts, and remove the hooks of `sums` then.

    Args:
        model: the model, whose mode stays as it is.
        batches: the batches of this rank, on any device; each rank needs at least one.
        sums: counts the real tokens.
        step: the work on a batch, which is on the model's device, such as a forward and a backward pass.
        passes: the number of passes, and their report.
    """
    # A list, because a rank with fewer batches begins again. Evaluation mode, because dropout would change the moments.
    batches, training = list(batches), model.training
    model.eval()
    total = max(len(batches), passes.rounds) if batches else 0
    try:
        with Activity(passes.what, total, "batches", done=passes.done) as activity:
            for number in range(passes.done, total):
                batch = batches[number % len(batches)]
                # A batch that is repeated for the sake of the other ranks counts nothing.
                sums.count((batch.attention_mask != 0) & (number < len(batches)))
                step(batch.with_positions(shift=is_causal(model.config)).to(model.device))
                sums.finish()
                activity.advance()
                passes.after(sums, number + 1, total)
    finally:
        sums.remove()
        if training:
            model.train()
