"""What the attention kernels share: a block of queries or keys, its scores, who sees whom, and the derivatives."""

# Triton reads the annotations of a kernel as part of its code.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

SCAN = tl.constexpr(1024)
"""Segment numbers read at a time."""


class Model(NamedTuple):
    """One model's side of an attention loss, as the kernels take it."""

    query_ptr: Tensor
    key_ptr: Tensor
    query_strides: tuple[int, ...]
    """Of sequences, heads and tokens; the features of a token are contiguous."""
    key_strides: tuple[int, ...]
    groups: int
    width: int
    scaling: float


@triton.jit
def load_queries(model, batch, head, row, segment, PADDED: tl.constexpr):
    """Queries of one head, (rows, PADDED), 0 at padding whatever stands there."""
    ptr = model.query_ptr + batch.to(tl.int64) * model.query_strides[0] + head.to(tl.int64) * model.query_strides[1]
    return _load(ptr, model.query_strides[2], row, segment, model.width, PADDED)


@triton.jit
def load_keys(model, batch, head, heads, column, segment, PADDED: tl.constexpr):
    """Keys that a query head reads, (columns, PADDED), 0 at padding whatever stands there."""
    group = head // (heads // model.groups)
    ptr = model.key_ptr + batch.to(tl.int64) * model.key_strides[0] + group.to(tl.int64) * model.key_strides[1]
    return _load(ptr, model.key_strides[2], column, segment, model.width, PADDED)


@triton.jit
def _load(ptr, stride, position, segment, width, PADDED: tl.constexpr):
    feature = tl.arange(0, PADDED)
    at = position.to(tl.int64)[:, None] * stride + feature[None, :]
    return tl.load(ptr + at, mask=(segment != 0)[:, None] & (feature < width)[None, :], other=0.0)


@triton.jit
def scores(queries, keys, scaling):
    """Scaled products of queries and keys, (rows, columns), fp32."""
    return tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling


@triton.jit
def visible(row, column, row_segment, segment, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Which key each query sees: (rows, columns)."""
    seen = (row_segment[:, None] == segment[None, :]) & (row_segment != 0)[:, None]
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    if WINDOWED:
        seen = seen & (row[:, None] - column[None, :] < window)
    return seen


@triton.jit
def span(segments_ptr, segment, tokens):
    """First position, and one past the last, whose segment number lies among those of a block; none if all padding."""
    lowest = tl.min(tl.where(segment > 0, segment, 2147483647), 0)
    highest = tl.max(segment, 0)
    first = tokens + 0
    last = tokens * 0
    for start in range(0, tokens, SCAN):
        at = start + tl.arange(0, SCAN)
        other = tl.load(segments_ptr + at, mask=at < tokens, other=0)
        among = (other > 0) & (other >= lowest) & (other <= highest)
        first = tl.minimum(first, tl.min(tl.where(among, at, tokens), 0))
        last = tl.maximum(last, tl.max(tl.where(among, at + 1, 0), 0))
    return first, last


@triton.jit
def derivatives(student, teacher, seen, statistics_ptr, row, tokens, queries, KIND: tl.constexpr):
    """Derivative of each query's loss by its student scores: (rows, columns), 0 where not seen."""
    first = tl.load(statistics_ptr + queries + row, mask=row < tokens, other=1.0)[:, None]
    if KIND == "score_mse":
        derivative = 2 * (student - teacher) / first
    else:
        log_p = student - first
        log_q = teacher - tl.load(statistics_ptr + 2 * queries + row, mask=row < tokens, other=0.0)[:, None]
        if KIND == "student_teacher":
            loss = tl.load(statistics_ptr + row, mask=row < tokens, other=0.0)[:, None]
            derivative = tl.exp(log_p) * (log_p - log_q - loss)
        else:
            derivative = tl.exp(log_p) - tl.exp(log_q)
    return tl.where(seen, derivative, 0.0)


@triton.jit
def derivative_product(derivative, rows):
    """Derivatives times queries or keys, fp32; in TF32 where those are fp16, whose range would lose small ones."""
    if rows.dtype == tl.float16:
        product = tl.dot(derivative, rows.to(tl.float32), input_precision="tf32")
    else:
        product = tl.dot(derivative.to(rows.dtype), rows, input_precision="ieee")
    return product


@triton.jit
def store_rows(ptr, values, position, tokens, width, PADDED: tl.constexpr):
    """Write (rows, PADDED) of one head, contiguous, without what was padded."""
    feature = tl.arange(0, PADDED)
    at = position.to(tl.int64)[:, None] * width + feature[None, :]
    tl.store(ptr + at, values, mask=(position < tokens)[:, None] & (feature < width)[None, :])
