"""Functions shared by the attention kernels: loading blocks of queries and keys, scores, visibility, derivatives."""

# Triton reads the annotations of a kernel as part of its code.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

SCAN = tl.constexpr(1024)
"""Number of segment numbers read at a time."""


class Model(NamedTuple):
    """The inputs of an attention loss from one model, in the form of the kernels."""

    query_ptr: Tensor
    key_ptr: Tensor
    query_strides: tuple[int, ...]
    """Strides of sequences, heads and tokens; the features of a token are contiguous."""
    key_strides: tuple[int, ...]
    groups: int
    width: int
    scaling: float


@triton.jit
def load_queries(model, batch, head, row, segment, PADDED: tl.constexpr):
    """Queries of one head, (rows, PADDED); 0 at padding, whose stored values are ignored."""
    ptr = model.query_ptr + batch.to(tl.int64) * model.query_strides[0] + head.to(tl.int64) * model.query_strides[1]
    return _load(ptr, model.query_strides[2], row, segment, model.width, PADDED)


@triton.jit
def load_keys(model, batch, head, heads, column, segment, PADDED: tl.constexpr):
    """Keys of a query head, (columns, PADDED); 0 at padding, whose stored values are ignored."""
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
    """Which keys each query sees: (rows, columns)."""
    seen = (row_segment[:, None] == segment[None, :]) & (row_segment != 0)[:, None]
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    if WINDOWED:
        seen = seen & (row[:, None] - column[None, :] < window)
    return seen


@triton.jit
def span(segments_ptr, segment, tokens):
    """The range (first, last + 1) of positions with segment numbers of the block; empty if the block is all padding."""
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
    """Derivative of each query's loss with respect to the student's scores: (rows, columns), 0 at invisible keys."""
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
    """Derivatives times queries or keys, in fp32; TF32 for fp16 inputs, because fp16 would lose small derivatives."""
    if rows.dtype == tl.float16:
        product = tl.dot(derivative, rows.to(tl.float32), input_precision="tf32")
    else:
        product = tl.dot(derivative.to(rows.dtype), rows, input_precision="ieee")
    return product


@triton.jit
def store_rows(ptr, values, position, tokens, width, PADDED: tl.constexpr):
    """Write (rows, PADDED) of one head to contiguous memory, without the padded features."""
    feature = tl.arange(0, PADDED)
    at = position.to(tl.int64)[:, None] * width + feature[None, :]
    tl.store(ptr + at, values, mask=(position < tokens)[:, None] & (feature < width)[None, :])
