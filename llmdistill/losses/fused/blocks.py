"""Attention losses in blocks of queries, value and gradient in one pass: a T x T matrix is never allocated.

A block holds the scores of some sequences, heads and queries against all keys that these queries can see. Its buffers
stay in cache. The derivative with respect to the student's scores overwrites these scores, and the gradients of queries
and keys are computed from it at once.

Letters in addition to the legend: S sequences, L rows (queries) and J keys of a block; N = S x key heads; X = rows of
all query heads that share a key head, so that one product covers all grouped queries and keys are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmdistill.attention_mask import AttentionMask
from llmdistill.losses.fused.block_rows import AttentionKind, hidden_keys, row_losses

_CPU_BUDGET = 3 * 2**16
"""Scores of one model in a block, for each thread. With this size most of the three buffers stays in a core's cache; in
smaller blocks threads wait for one another."""

_CUDA_BUDGET = 2**22
"""Scores of one model in a block for a whole GPU: large enough to hide the time to launch the kernels."""

_LEAST_ROWS = 32
"""Minimum number of queries in a block, because products of fewer queries are slow."""

_LEAST_DIAGONAL = 64
"""Minimum number of queries in a block at the causal diagonal, because half of such a block is masked."""


Side = Literal["query", "key"]
"""The sides of the student's scores, with respect to which gradients are computed."""


class AttentionInputs(NamedTuple):
    """The inputs of one layer's attention distribution."""

    query: Tensor
    """(B, H, T, D)."""
    key: Tensor
    """(B, G, T, D); H is a multiple of G."""
    scaling: float
    """Factor on query·key before the softmax."""


class BlockLoss(NamedTuple):
    """A loss and its gradient."""

    sum: Tensor
    """Scalar, at least fp32: sum over real queries of the mean over heads."""
    query_grad: Tensor | None
    """Gradient of the sum with respect to the student's queries, (B, H, T, D) in their dtype; None if not requested."""
    key_grad: Tensor | None
    """Gradient of the sum with respect to the student's keys, (B, G, T, D) in their dtype; None if not requested."""


class BlockShape(NamedTuple):
    """The size of a block: the numbers of sequences, heads and rows (queries)."""

    sequences: int
    heads: int
    rows: int


@torch.no_grad()
def block_loss(
    kind: AttentionKind,
    student: AttentionInputs,
    teacher: AttentionInputs,
    mask: AttentionMask,
    gradients: Collection[Side],
    *,
    shape: BlockShape | None = None,
) -> BlockLoss:
    """Compute the loss of one layer and, if requested, its gradients with respect to the student's queries and keys.

    Padded positions may hold any value, even NaN: they add nothing to the loss and their gradient is zero. Student and
    teacher have the same number of query heads H; G and D may differ. If the student's queries and keys are the same
    tensor object, "query" among `gradients` requests the total gradient of this tensor, and "key" must not be there.
    The default shape of a block depends on the device.
    """
    batch, heads, tokens, _ = student.query.shape
    both = student.key is student.query
    assert not (both and "key" in gradients), "one tensor has one gradient"
    shape = shape or block_shape(student, teacher, mask)
    # fp64 inputs (gradcheck) stay fp64; sums of bf16 and fp16 are fp32.
    dtype = torch.float64 if torch.float64 in (student.query.dtype, teacher.query.dtype) else torch.float32
    # 0 at padding, else a share of the mean over heads.
    weights_B1T1 = mask.real_BT.to(dtype)[:, None, :, None] / heads
    total = torch.zeros((), device=student.query.device, dtype=dtype)
    of_query = torch.empty_like(student.query) if "query" in gradients else None
    # One tensor on both sides: `_StripGradient.finish` writes its total gradient.
    of_key = of_query if both else torch.empty_like(student.key) if "key" in gradients else None
    if total.is_meta:  # without values only the shapes of the results matter
        return BlockLoss(total, of_query, None if both else of_key)
    # Scores of the student, scores of the teacher, and room for products and exponentials.
    buffers = [torch.empty(math.prod(shape) * tokens, device=total.device, dtype=dtype) for _ in range(3)]
    for sequences in _split(batch, shape.sequences):
        of_strip = mask.of_sequences(sequences)
        real_S1T1 = None if mask.is_one_segment else of_strip.real_BT[:, None, :, None]
        for at in _split(heads, shape.heads):
            ours, theirs = (_Strip(inputs, sequences, at, real_S1T1, dtype) for inputs in (student, teacher))
            gradient = None
            if gradients:
                gradient = _StripGradient(ours, sequences, at, of_query, of_key)
            for rows in _split(tokens, shape.rows):
                # The keys that any of these queries can see.
                first = 0 if mask.window is None else max(0, rows.start - mask.window + 1)
                keys = slice(first, rows.stop if mask.causal else tokens)
                size = (*ours.query_SHTD.shape[:2], rows.stop - rows.start, keys.stop - keys.start)  # (S, H, L, J)
                # Views of the same memory for every block, so that it stays in cache.
                s, t, spare = (buffer[: math.prod(size)].view(size) for buffer in buffers)
                queries_NXD = ours.queries(rows)
                ours.scores(queries_NXD, keys, out=s)
                theirs.scores(theirs.queries(rows), keys, out=t)
                hidden = hidden_keys(of_strip, rows, keys, one_segment=mask.is_one_segment, like=s)
                losses = row_losses(kind, s, t, spare, hidden, derivative=gradient is not None)
                weights_S1L1 = weights_B1T1[sequences, :, rows]
                total += (losses.value * weights_S1L1).sum()
                if gradient is not None:
                    gradient.add(s, losses.factor * weights_S1L1, queries_NXD, rows, keys)
            if gradient is not None:
                gradient.finish()
    return BlockLoss(total, of_query, None if both else of_key)


def block_shape(student: AttentionInputs, teacher: AttentionInputs, mask: AttentionMask) -> BlockShape:
    """Return the size of a block with which the three buffers of scores stay in cache."""
    batch, heads, tokens, _ = student.query.shape
    # A block contains only complete groups of query heads of both models.
    group = math.lcm(heads // student.key.shape[1], heads // teacher.key.shape[1])
    budget = _CUDA_BUDGET if student.query.is_cuda else _CPU_BUDGET * torch.get_num_threads()
    keys, most = tokens, tokens
    if mask.causal or mask.window is not None:
        most = max(_LEAST_DIAGONAL, tokens // 8)  # Smaller blocks waste less above the diagonal.
    if mask.causal and mask.window is not None:
        keys = min(tokens, most + mask.window)
    rows = _even_size(tokens, min(most, max(_LEAST_ROWS, budget // (group * keys))))
    at = _even_size(heads // group, budget // (rows * keys * group)) * group
    # If not even the heads of one sequence fit into a block, it has one sequence.
    sequences = _even_size(batch, budget // (rows * keys * heads)) if at == heads else 1
    return BlockShape(sequences, at, rows)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right of two batches of matrices of any dtype, accumulated and returned in `dtype`."""
    if left.dtype == dtype:
        return torch.bmm(left, right)
    # Only CUDA has `out_dtype`; `_Strip` chooses operands of another dtype there alone.
    return torch.bmm(left, right, out_dtype=dtype)


class _Strip:
    """Queries and keys of one model for some sequences and heads: the keys are ready for the products, and the queries
    are prepared block by block."""

    def __init__(
        self, inputs: AttentionInputs, sequences: slice, heads: slice, real_S1T1: Tensor | None, dtype: torch.dtype
    ) -> None:
        per_key = inputs.query.shape[1] // inputs.key.shape[1]
        self.groups = slice(heads.start // per_key, heads.stop // per_key)
        self.query_SHTD = inputs.query[sequences, heads]
        self.scaling = inputs.scaling
        self.dtype = dtype
        # The dtype of the operands of the products is bf16 if the device accumulates in fp32, else the dtype of the
        # sums. It is never fp16, because the derivatives would leave the range of fp16.
        is_bf16 = inputs.query.dtype == inputs.key.dtype == torch.bfloat16
        accumulates = inputs.query.is_cuda and is_bf16 and dtype == torch.float32
        self.operands = torch.bfloat16 if accumulates else dtype
        self.real_S1T1 = real_S1T1
        self.key_NTD = self._clear_padding(inputs.key[sequences, self.groups], slice(None)).flatten(0, 1)

    def queries(self, rows: slice) -> Tensor:
        """Return the queries of some rows, (N, X, D)."""
        query_SHLD = self._clear_padding(self.query_SHTD[:, :, rows], rows)
        return query_SHLD.reshape(len(self.key_NTD), -1, query_SHLD.shape[-1])

    def scores(self, queries_NXD: Tensor, keys: slice, *, out: Tensor) -> None:
        """Write the scaled products of the queries with some keys to `out`, (S, H, L, J)."""
        out_NXJ = out.view(*queries_NXD.shape[:2], -1)
        key_NDJ = self.key_NTD[:, keys].mT
        if self.operands == self.dtype:
            # With beta 0 the product overwrites `out`, and alpha scales it without another pass.
            torch.baddbmm(out_NXJ, queries_NXD, key_NDJ, beta=0, alpha=self.scaling, out=out_NXJ)
        else:
            torch.mul(product(queries_NXD, key_NDJ, self.dtype), self.scaling, out=out_NXJ)

    def _clear_padding(self, heads_SHLD: Tensor, rows: slice) -> Tensor:
        if self.real_S1T1 is not None:
            # Not a product with the mask: padding may hold NaN, and NaN times zero is NaN.
            heads_SHLD = torch.where(self.real_S1T1[:, :, rows], heads_SHLD, 0.0)
        return heads_SHLD.to(self.operands)


class _StripGradient:
    """The gradient with respect to the student's queries and keys of one strip, accumulated block by block."""

    def __init__(
        self, strip: _Strip, sequences: slice, heads: slice, of_query: Tensor | None, of_key: Tensor | None
    ) -> None:
        self.strip = strip
        self.both = of_query is of_key
        self.of_query_SHTD = None if of_query is None else of_query[sequences, heads]
        self.of_key_SGTD = None if of_key is None else of_key[sequences, strip.groups]
        # Summed over all blocks of queries, in at least fp32; `finish` rounds it once.
        self.by_key_NTD = None if of_key is None else torch.zeros_like(strip.key_NTD, dtype=strip.dtype)

    def add(self, derivative_SHLJ: Tensor, factor_SHL1: Tensor, queries_NXD: Tensor, rows: slice, keys: slice) -> None:
        """Add the gradient from one block, given the derivative with respect to its scores and a factor per row."""
        strip = self.strip
        # (S, H, L, J) to (S · key heads, query heads of a key head · L, J)
        derivative_NXJ = derivative_SHLJ.view(*queries_NXD.shape[:2], -1).to(strip.operands)
        # The factor may broadcast over heads and rows, which are one dimension in X.
        factor_NX1 = (
            (factor_SHL1 * strip.scaling).expand(*derivative_SHLJ.shape[:3], 1).reshape(*queries_NXD.shape[:2], 1)
        )
        if self.of_query_SHTD is not None:
            query_NXD = product(derivative_NXJ, strip.key_NTD[:, keys], strip.dtype).mul_(factor_NX1)
            # If one tensor is queries and keys, both gradients are added up in the buffer of the keys, in fp32.
            if self.both and self.by_key_NTD is not None:
                self.by_key_NTD[:, rows] += query_NXD
            else:
                # Each query is in one block, so its gradient is complete; a key is in many.
                self.of_query_SHTD[:, :, rows] = query_NXD.view(*derivative_SHLJ.shape[:3], -1).to(
                    self.of_query_SHTD.dtype
                )
        if self.by_key_NTD is not None:
            # The factor goes to the queries, which are smaller than the block of scores.
            weighted_NXD = (queries_NXD * factor_NX1).to(strip.operands)
            # A view: adding to it adds to the sum of the strip.
            by_key_NJD = self.by_key_NTD[:, keys]
            if strip.operands == strip.dtype:
                by_key_NJD.baddbmm_(derivative_NXJ.mT, weighted_NXD)  # dK = Σ dSᵀ Q
            else:
                by_key_NJD += product(derivative_NXJ.mT, weighted_NXD, strip.dtype)

    def finish(self) -> None:
        """Write the gradient of the keys; call it after all blocks have been added."""
        if self.of_key_SGTD is not None and self.by_key_NTD is not None:
            by_key_SGTD = self.by_key_NTD.view(self.of_key_SGTD.shape)
            if self.strip.real_S1T1 is not None:
                # A hidden key keeps a share of exp(_NOTHING), which padding must not show as a gradient.
                by_key_SGTD = torch.where(self.strip.real_S1T1, by_key_SGTD, 0.0)
            self.of_key_SGTD.copy_(by_key_SGTD)


def _split(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _even_size(total: int, most: int) -> int:
    """Return the part size, at most `most`, that splits a total into parts as equal as possible."""
    return math.ceil(total / math.ceil(total / max(1, most)))
