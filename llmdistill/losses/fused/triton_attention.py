"""The attention losses without a T x T matrix, as Triton kernels similar to flash attention.

There are three launches: the first computes the values of the rows and the log-sum-exps for their gradients, the second
the gradient of the queries, the third the gradient of the keys. Each launch loops over blocks of scores that stay on
the chip. The sizes of blocks are estimates: on a GPU only whole steps have been timed (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton

from llmdistill.attention_mask import AttentionMask
from llmdistill.losses.fused.block_rows import AttentionKind
from llmdistill.losses.fused.blocks import AttentionInputs, BlockLoss, Side
from llmdistill.losses.fused.triton_attention_kernels import Model, key_gradient, query_gradient, row_values


def attention_loss(
    kind: AttentionKind,
    student: AttentionInputs,
    teacher: AttentionInputs,
    mask: AttentionMask,
    gradients: Collection[Side],
    *,
    blocks: tuple[int, int] | None = None,
) -> BlockLoss:
    """Compute the loss of one layer and, if requested, its gradients; arguments are those of `blocks.block_loss`.

    For one row, let p be the student's and q the teacher's attention, and s and t their scores. Then ∂KL(p‖q)/∂s =
    p (log p - log q - KL), ∂KL(q‖p)/∂s = p - q, and the derivative of the mean squared error is 2 (s - t) / visible
    keys. Padded positions may hold any value, even NaN. Sums are computed in fp32 in a fixed order, without atomics;
    products of fp32 inputs are exact fp32 (no TF32). Besides the gradients, the kernels allocate three numbers per row.

    Queries and keys are fp32, bf16 or fp16. `blocks` are the numbers of queries and keys of a block, powers of two from
    16; the default depends on head width and dtype.
    """
    both = student.key is student.query
    assert not (both and "key" in gradients), "one tensor has one gradient"
    student, teacher = _prepare(student), _prepare(teacher)
    batch, heads, tokens, width = student.query.shape
    device = student.query.device
    assert teacher.query.shape[:3] == (batch, heads, tokens), "student and teacher must have the same number of heads"
    assert mask.window is None or mask.window > 0, f"a window of {mask.window} tokens"
    if blocks is None:
        # Blocks that fit into the registers of an A100; fp32 products use no tensor cores and need more.
        largest = max(_padded_width(student), _padded_width(teacher))
        if torch.float32 in (student.query.dtype, teacher.query.dtype):
            blocks = (32, 32) if largest <= 64 else (16, 16)
        else:
            blocks = (64, 64) if largest <= 128 else (32, 32)
    rows, columns = blocks
    # int32, whose largest number is infinity in the kernels.
    segments_BT = mask.segments_BT.to(torch.int32).contiguous()
    # Without a limit the kernels read none, and any pointer will do.
    visible_until = segments_BT if mask.visible_until_BT is None else mask.visible_until_BT.to(torch.int32).contiguous()
    # For each query: its loss, and the divisors of the softmaxes of student and teacher (or of the mean).
    statistics = torch.empty(3, batch, heads, tokens, dtype=torch.float32, device=device)
    groups = student.key.shape[1]
    common = {
        "student": _make_model(student),
        "teacher": _make_model(teacher),
        "segments_ptr": segments_BT,
        "visible_until_ptr": visible_until,
        "statistics_ptr": statistics,
        "heads": heads,
        "tokens": tokens,
        "queries": statistics[0].numel(),
        "window": mask.window or 0,
        "KIND": kind,
        "CAUSAL": mask.causal,
        "WINDOWED": mask.window is not None,
        "BOUNDED": mask.has_limits,
        "ROWS": rows,
        "COLUMNS": columns,
        "STUDENT_PADDED": _padded_width(student),
        "TEACHER_PADDED": _padded_width(teacher),
    }
    # The mean over heads, and the derivative of the scores with respect to query·key.
    factor = student.scaling / heads
    of_query = of_key = None
    if "query" in gradients:
        of_query = torch.empty(batch, heads, tokens, width, dtype=student.query.dtype, device=device)
    if "key" in gradients or (both and "query" in gradients):
        of_key = torch.empty(batch, groups, tokens, width, dtype=student.key.dtype, device=device)
    row_grid, column_grid = (batch * heads, triton.cdiv(tokens, rows)), (batch * groups, triton.cdiv(tokens, columns))
    if batch * tokens > 0:  # CUDA refuses an empty grid
        # Triton launches on the current GPU, which need not be that of the tensors.
        with torch.cuda.device_of(student.query):
            row_values[row_grid](**common)
            if of_query is not None:
                query_gradient[row_grid](gradient_ptr=of_query, factor=factor, **common)
            if of_key is not None:
                key_gradient[column_grid](gradient_ptr=of_key, factor=factor, **common)
    # One tensor on both sides: its gradient is the sum of what both kernels wrote.
    if both and of_query is not None and of_key is not None:
        of_query, of_key = of_query + of_key, None
    return BlockLoss(statistics[0].sum() / heads, of_query, of_key)


def _prepare(sides: AttentionInputs) -> AttentionInputs:
    heads, groups = sides.query.shape[1], sides.key.shape[1]
    assert heads % groups == 0, f"{heads} query heads are no multiple of {groups} key heads"
    assert sides.query.dtype == sides.key.dtype, f"queries in {sides.query.dtype}, keys in {sides.key.dtype}"
    assert sides.query.element_size() <= 4, f"no kernel takes {sides.query.dtype}"
    query, key = (side if side.stride(-1) == 1 else side.contiguous() for side in (sides.query, sides.key))
    return AttentionInputs(query, key, sides.scaling)


def _padded_width(sides: AttentionInputs) -> int:
    """Return the head width, padded as the matrix products require."""
    # tl.dot takes sides of at least 16, and tl.arange powers of two.
    return max(16, triton.next_power_of_2(sides.query.shape[-1]))


def _make_model(sides: AttentionInputs) -> Model:
    *query_strides, _ = sides.query.stride()
    *key_strides, _ = sides.key.stride()
    groups, width = sides.key.shape[1], sides.key.shape[-1]
    return Model(sides.query, sides.key, tuple(query_strides), tuple(key_strides), groups, width, sides.scaling)
