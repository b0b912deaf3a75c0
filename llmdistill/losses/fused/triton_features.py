"""The squared error of features and its gradient, as a Triton kernel that reads each model once."""

# Triton reads the annotations of a kernel as part of its code.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096
"""Number of features that a program takes, of one token or several. A token that is normalized is never cut."""
WIDEST_CUT = 1024
"""Largest part of a token's features that a program takes, if the token may be cut."""


class Features(NamedTuple):
    """A tensor of features in the form of the kernel."""

    ptr: Tensor
    strides: tuple[int, ...]
    """Strides of sequences, heads, tokens and features of a head."""


def squared_error(
    student: Tensor, teacher: Tensor, real_BT: Tensor, *, min_square: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """`features.squared_error` in one launch, for fp32, bf16 and fp16.

    Each program takes a block of tokens, and writes its share of the sum and its part of the gradient. The shares are
    then summed in a fixed order, without atomics. All computations are fp32. Padding is not read, and its gradient is
    zero. The tensors may have any strides; the gradient has those of the student, unless they leave gaps in memory.
    """
    assert student.shape == teacher.shape, f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)}"
    assert max(student.element_size(), teacher.element_size()) <= 4, f"no kernel for {student.dtype}, {teacher.dtype}"
    assert real_BT.shape == (student.shape[0], student.shape[-2]), f"a mask of {tuple(real_BT.shape)}"
    gradient = torch.empty_like(student) if with_gradient else None
    width = student.shape[-1]
    features, rows = width * (student.shape[1] if student.dim() == 4 else 1), real_BT.numel()
    block = triton.next_power_of_2(features)
    if min_square is None:
        block = min(block, WIDEST_CUT)
    block_rows = max(1, TILE // block)
    grid = triton.cdiv(rows, block_rows), triton.cdiv(features, block)
    # One share of the sum for each program, (row blocks, feature blocks).
    shares = torch.empty(grid, dtype=torch.float32, device=student.device)
    if shares.numel() > 0:
        with torch.cuda.device_of(student):
            squared_error_shares[grid](
                _features(student),
                _features(teacher),
                # Without gradient the kernel writes none, and any pointer will do.
                _features(student if gradient is None else gradient),
                real_BT.contiguous(),
                shares,
                rows,
                real_BT.shape[1],
                0.0 if min_square is None else min_square,
                FEATURES=features,
                WIDTH=width,
                NORMALIZED=min_square is not None,
                WITH_GRADIENT=with_gradient,
                ROWS=block_rows,
                BLOCK=block,
                # At most 32 features of a model for each thread.
                num_warps=min(32, max(4, block_rows * block // 1024)),
            )
    return shares.sum(), gradient


def _features(tensor: Tensor) -> Features:
    batch, *heads, tokens, features = tensor.stride()
    # Without heads all features are of head 0, so any stride will do.
    return Features(tensor, (batch, *(heads or [0]), tokens, features))


@triton.jit
def squared_error_shares(
    student,
    teacher,
    gradient,
    real_ptr,
    shares_ptr,
    rows,
    tokens,
    min_square,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMALIZED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The share of the sum, and the gradient, of a block of tokens and features; a row is a token of the batch."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (feature < FEATURES)[None, :]
    real = inside & tl.load(real_ptr + row, mask=row < rows, other=0).to(tl.int1)[:, None]
    of_student = tl.load(_places(student, row, feature, tokens, WIDTH), mask=real, other=0.0).to(tl.float32)
    of_teacher = tl.load(_places(teacher, row, feature, tokens, WIDTH), mask=real, other=0.0).to(tl.float32)
    error = of_student - of_teacher
    if NORMALIZED:
        square = tl.sum(of_teacher * of_teacher, 1) / FEATURES
        weight = 1 / (tl.maximum(square, min_square) * FEATURES)
    else:
        weight = tl.full((ROWS,), 1 / FEATURES, tl.float32)
    share = tl.sum(tl.sum(error * error, 1) * weight, 0)
    tl.store(shares_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), share)
    if WITH_GRADIENT:
        # At padding both loads gave 0, and so the gradient is 0.
        tl.store(_places(gradient, row, feature, tokens, WIDTH), 2 * weight[:, None] * error, mask=inside)


@triton.jit
def _places(features, row, feature, tokens, WIDTH: tl.constexpr):
    """Pointers to the features of each row, (ROWS, BLOCK)."""
    token = row // tokens * features.strides[0] + row % tokens * features.strides[2]
    # 64 bits: the strides of heads alone may exceed 2³¹.
    here = (feature // WIDTH).to(tl.int64) * features.strides[1] + (feature % WIDTH).to(tl.int64) * features.strides[3]
    return features.ptr + token[:, None] + here[None, :]
