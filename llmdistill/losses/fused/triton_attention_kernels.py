"""The three kernels of an attention loss (values, gradient of the queries, gradient of the keys) and their parts."""

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
    # Grouped-query attention: successive query heads share a key head.
    group = head // (heads // model.groups)
    ptr = model.key_ptr + batch.to(tl.int64) * model.key_strides[0] + group.to(tl.int64) * model.key_strides[1]
    return _load(ptr, model.key_strides[2], column, segment, model.width, PADDED)


@triton.jit
def _load(ptr, stride, position, segment, width, PADDED: tl.constexpr):
    feature = tl.arange(0, PADDED)
    at = position.to(tl.int64)[:, None] * stride + feature[None, :]  # positions times strides may exceed 2³¹
    return tl.load(ptr + at, mask=(segment != 0)[:, None] & (feature < width)[None, :], other=0.0)


@triton.jit
def scores(queries, keys, scaling):
    """Scaled products of queries and keys, (rows, columns), fp32."""
    # By default Triton rounds fp32 inputs to TF32, which has 10 of the 23 bits of their mantissa.
    return tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling


@triton.jit
def visible(
    row,
    column,
    row_segment,
    segment,
    visible_until,
    window,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Which keys each query sees: (rows, columns)."""
    # Segment 0 is padding, which sees nothing and is seen by nothing.
    seen = (row_segment[:, None] == segment[None, :]) & (row_segment != 0)[:, None]
    if CAUSAL:
        seen = seen & (column[None, :] <= row[:, None])
    if WINDOWED:
        seen = seen & (row[:, None] - column[None, :] < window)
    if BOUNDED:
        seen = seen & (column[None, :] < visible_until[:, None])
    return seen


@triton.jit
def load_visible_until(visible_until_ptr, row, tokens, BOUNDED: tl.constexpr):
    """The position before which the keys of each query lie, (rows,); not read if there is no such limit."""
    visible_until = row
    if BOUNDED:
        visible_until = tl.load(visible_until_ptr + row, mask=row < tokens, other=0)
    return visible_until


@triton.jit
def span(segments_ptr, segment, tokens):
    """The range (first, last + 1) of positions with segment numbers of the block; empty if the block is all padding."""
    # The largest int32 stands for infinity: padding (0) must not be the minimum.
    lowest = tl.min(tl.where(segment > 0, segment, 2147483647), 0)
    highest = tl.max(segment, 0)
    first = tokens + 0
    last = tokens * 0
    for start in range(0, tokens, SCAN):
        at = start + tl.arange(0, SCAN)
        other = tl.load(segments_ptr + at, mask=at < tokens, other=0)
        # Keys of other segments may lie in between; `visible` hides them.
        among = (other > 0) & (other >= lowest) & (other <= highest)
        first = tl.minimum(first, tl.min(tl.where(among, at, tokens), 0))
        last = tl.maximum(last, tl.max(tl.where(among, at + 1, 0), 0))
    return first, last


@triton.jit
def derivatives(student, teacher, seen, statistics_ptr, row, tokens, queries, KIND: tl.constexpr):
    """Derivative of each query's loss with respect to the student's scores: (rows, columns), 0 at invisible keys."""
    # 1 beyond the last token, because score_mse divides by it.
    first = tl.load(statistics_ptr + queries + row, mask=row < tokens, other=1.0)[:, None]
    if KIND == "score_mse":
        derivative = 2 * (student - teacher) / first  # first is the number of visible keys
    else:
        log_p = student - first  # first is the log-sum-exp of the student's row
        log_q = teacher - tl.load(statistics_ptr + 2 * queries + row, mask=row < tokens, other=0.0)[:, None]
        if KIND == "student_teacher":
            loss = tl.load(statistics_ptr + row, mask=row < tokens, other=0.0)[:, None]
            derivative = tl.exp(log_p) * (log_p - log_q - loss)  # ∂KL(p‖q)/∂s, MaKD eq. 12
        else:
            derivative = tl.exp(log_p) - tl.exp(log_q)  # ∂KL(q‖p)/∂s, MiniLM eq. 3
    # This also drops the inf and NaN of padding, whose divisors are log 0.
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


@triton.jit
def row_values(
    student,
    teacher,
    segments_ptr,
    visible_until_ptr,
    statistics_ptr,
    heads,
    tokens,
    queries,
    window,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STUDENT_PADDED: tl.constexpr,
    TEACHER_PADDED: tl.constexpr,
):
    """The loss and divisors of each query, by online softmaxes; one program per block of queries of one head."""
    pair = tl.program_id(0)
    batch = pair // heads
    head = pair % heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    segments_ptr += batch.to(tl.int64) * tokens
    visible_until_ptr += batch.to(tl.int64) * tokens
    row_segment = tl.load(segments_ptr + row, mask=row < tokens, other=0)
    visible_until = load_visible_until(visible_until_ptr, row, tokens, BOUNDED)
    student_query = load_queries(student, batch, head, row, row_segment, STUDENT_PADDED)
    teacher_query = load_queries(teacher, batch, head, row, row_segment, TEACHER_PADDED)

    student_max = tl.full((ROWS,), -float("inf"), tl.float32)
    teacher_max = tl.full((ROWS,), -float("inf"), tl.float32)
    student_sum = tl.zeros((ROWS,), tl.float32)
    teacher_sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)  # weighted sum of the log ratios, or sum of the squared errors
    first, last = span(segments_ptr, row_segment, tokens)
    if CAUSAL:
        # No query of the block sees keys after its last query, or out of the window of its first.
        last = tl.minimum(last, (tl.program_id(1) + 1) * ROWS)
    if WINDOWED:
        first = tl.maximum(first, tl.program_id(1) * ROWS - window + 1)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        segment = tl.load(segments_ptr + column, mask=column < tokens, other=0)
        seen = visible(row, column, row_segment, segment, visible_until, window, CAUSAL, WINDOWED, BOUNDED)
        student_key = load_keys(student, batch, head, heads, column, segment, STUDENT_PADDED)
        teacher_key = load_keys(teacher, batch, head, heads, column, segment, TEACHER_PADDED)
        s = scores(student_query, student_key, student.scaling)
        t = scores(teacher_query, teacher_key, teacher.scaling)
        difference = tl.where(seen, s - t, 0.0)
        if KIND == "score_mse":
            total += tl.sum(difference * difference, 1)
            student_sum += tl.sum(tl.where(seen, 1.0, 0.0), 1)  # the number of visible keys
        else:
            student_new = tl.maximum(student_max, tl.max(tl.where(seen, s, -float("inf")), 1))
            teacher_new = tl.maximum(teacher_max, tl.max(tl.where(seen, t, -float("inf")), 1))
            # Online softmax: a new maximum rescales all sums so far.
            # Until a row has seen a key its maximum is -inf, and -inf - -inf would be NaN.
            student_decay = tl.where(student_sum > 0, tl.exp(student_max - student_new), 0.0)
            teacher_decay = tl.where(teacher_sum > 0, tl.exp(teacher_max - teacher_new), 0.0)
            student_share = tl.where(seen, tl.exp(s - student_new[:, None]), 0.0)
            teacher_share = tl.where(seen, tl.exp(t - teacher_new[:, None]), 0.0)
            student_sum = student_sum * student_decay + tl.sum(student_share, 1)
            teacher_sum = teacher_sum * teacher_decay + tl.sum(teacher_share, 1)
            if KIND == "student_teacher":
                total = total * student_decay + tl.sum(student_share * difference, 1)
            else:
                total = total * teacher_decay - tl.sum(teacher_share * difference, 1)
            student_max = student_new
            teacher_max = teacher_new

    if KIND == "score_mse":
        loss = total / student_sum
        student_divisor = student_sum
        teacher_divisor = student_sum
    else:
        student_divisor = student_max + tl.log(student_sum)
        teacher_divisor = teacher_max + tl.log(teacher_sum)
        if KIND == "student_teacher":
            loss = total / student_sum - (student_divisor - teacher_divisor)  # Σ p (s - t) - log Z_S + log Z_T
        else:
            loss = total / teacher_sum + (student_divisor - teacher_divisor)  # Σ q (t - s) - log Z_T + log Z_S
    at = statistics_ptr + pair.to(tl.int64) * tokens + row
    # A row of padding has seen no key: its divisors are log 0, and its loss is NaN.
    tl.store(at, tl.where(row_segment != 0, loss, 0.0), mask=row < tokens)
    tl.store(at + queries, student_divisor, mask=row < tokens)
    tl.store(at + 2 * queries, teacher_divisor, mask=row < tokens)


@triton.jit
def query_gradient(
    gradient_ptr,
    factor,
    student,
    teacher,
    segments_ptr,
    visible_until_ptr,
    statistics_ptr,
    heads,
    tokens,
    queries,
    window,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STUDENT_PADDED: tl.constexpr,
    TEACHER_PADDED: tl.constexpr,
):
    """dQ = factor · dS K for a block of queries of one head; dS is recomputed for each block of keys."""
    pair = tl.program_id(0)
    batch = pair // heads
    head = pair % heads
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    segments_ptr += batch.to(tl.int64) * tokens
    visible_until_ptr += batch.to(tl.int64) * tokens
    statistics_ptr += pair.to(tl.int64) * tokens
    row_segment = tl.load(segments_ptr + row, mask=row < tokens, other=0)
    visible_until = load_visible_until(visible_until_ptr, row, tokens, BOUNDED)
    student_query = load_queries(student, batch, head, row, row_segment, STUDENT_PADDED)
    teacher_query = load_queries(teacher, batch, head, row, row_segment, TEACHER_PADDED)

    result = tl.zeros((ROWS, STUDENT_PADDED), tl.float32)
    first, last = span(segments_ptr, row_segment, tokens)
    if CAUSAL:
        last = tl.minimum(last, (tl.program_id(1) + 1) * ROWS)
    if WINDOWED:
        first = tl.maximum(first, tl.program_id(1) * ROWS - window + 1)
    for start in range(first, last, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        segment = tl.load(segments_ptr + column, mask=column < tokens, other=0)
        seen = visible(row, column, row_segment, segment, visible_until, window, CAUSAL, WINDOWED, BOUNDED)
        student_key = load_keys(student, batch, head, heads, column, segment, STUDENT_PADDED)
        teacher_key = load_keys(teacher, batch, head, heads, column, segment, TEACHER_PADDED)
        s = scores(student_query, student_key, student.scaling)
        t = scores(teacher_query, teacher_key, teacher.scaling)
        derivative = derivatives(s, t, seen, statistics_ptr, row, tokens, queries, KIND)
        result += derivative_product(derivative, student_key)
    gradient_ptr += pair.to(tl.int64) * tokens * student.width
    store_rows(gradient_ptr, result * factor, row, tokens, student.width, STUDENT_PADDED)


@triton.jit
def key_gradient(
    gradient_ptr,
    factor,
    student,
    teacher,
    segments_ptr,
    visible_until_ptr,
    statistics_ptr,
    heads,
    tokens,
    queries,
    window,
    KIND: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BOUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STUDENT_PADDED: tl.constexpr,
    TEACHER_PADDED: tl.constexpr,
):
    """dK = factor · Σ dSᵀ Q for a block of keys of one key head, summed over all queries of its query heads."""
    pair = tl.program_id(0)
    batch = pair // student.groups
    heads_a_group = heads // student.groups
    first_head = pair % student.groups * heads_a_group
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    segments_ptr += batch.to(tl.int64) * tokens
    visible_until_ptr += batch.to(tl.int64) * tokens
    segment = tl.load(segments_ptr + column, mask=column < tokens, other=0)
    student_key = load_keys(student, batch, first_head, heads, column, segment, STUDENT_PADDED)

    result = tl.zeros((COLUMNS, STUDENT_PADDED), tl.float32)
    first, last = span(segments_ptr, segment, tokens)
    if CAUSAL:
        first = tl.maximum(first, tl.program_id(1) * COLUMNS)
    if WINDOWED:
        # The last key of the block is visible to the `window` queries from its own position on.
        last = tl.minimum(last, (tl.program_id(1) + 1) * COLUMNS - 1 + window)
    # One program sums over all query heads of its key head, so that no two programs add to one gradient.
    for member in range(heads_a_group):
        head = first_head + member
        # The teacher may group its heads otherwise, so its keys depend on the query head.
        teacher_key = load_keys(teacher, batch, head, heads, column, segment, TEACHER_PADDED)
        of_head = statistics_ptr + (batch * heads + head).to(tl.int64) * tokens
        for start in range(first, last, ROWS):
            row = start + tl.arange(0, ROWS)
            row_segment = tl.load(segments_ptr + row, mask=row < tokens, other=0)
            visible_until = load_visible_until(visible_until_ptr, row, tokens, BOUNDED)
            seen = visible(row, column, row_segment, segment, visible_until, window, CAUSAL, WINDOWED, BOUNDED)
            student_query = load_queries(student, batch, head, row, row_segment, STUDENT_PADDED)
            teacher_query = load_queries(teacher, batch, head, row, row_segment, TEACHER_PADDED)
            s = scores(student_query, student_key, student.scaling)
            t = scores(teacher_query, teacher_key, teacher.scaling)
            derivative = derivatives(s, t, seen, of_head, row, tokens, queries, KIND)
            # (COLUMNS, ROWS) x (ROWS, STUDENT_PADDED)
            result += derivative_product(tl.trans(derivative), student_query)
    gradient_ptr += pair.to(tl.int64) * tokens * student.width
    store_rows(gradient_ptr, result * factor, column, tokens, student.width, STUDENT_PADDED)
