"""Losses on tokens from the inputs of the LM head: computes its last linear and the losses together, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llmdistill.batch import HeadInputs, LogitScale, OtherTokens, TeacherRows, TopK
from llmdistill.losses.fused.head_chunk import choose_chunk_losses
from llmdistill.losses.other_tokens import SpanRows
from llmdistill.losses.terms import BoundTokenTerms, TokenTerm

_CPU_CHUNK = 256
"""Rows of a chunk on the CPU. Each chunk reads and writes the whole gradient of the weight; with 128 rows this takes
more than a tenth of the time of that product."""

_CUDA_CHUNK_BYTES = 1 << 28
"""Bytes of the logits of one chunk on CUDA."""

_SLAB = 8192
"""Vocabulary rows added at a time when the weight's gradient is summed in a wider dtype than that of the product."""


class TokenLosses(NamedTuple):
    """The losses of the given rows."""

    total: Tensor
    """Scalar: Σ factor · sum. Only this tensor has an autograd graph."""
    sums: Tensor
    """(C,), the sum of each term over the rows, without an autograd graph."""


def token_losses(
    student: HeadInputs,
    teacher: TeacherRows | None,
    labels_N: Tensor,
    terms: Sequence[TokenTerm],
    factors: Tensor,
    *,
    vocabulary: int | None = None,
    chunk: int | None = None,
) -> TokenLosses:
    """Return the sum of each term over the rows; only the logits of one chunk of rows are in memory at a time.

    The forward pass computes the gradients of all terms together, so that no logits are saved or computed twice. The
    backward pass only scales and returns these gradients. Therefore it can run only once, and it cannot be
    differentiated itself.

    Args:
        student: rows, weight and bias of the student; the total is differentiable with respect to all three. Without a
            weight the rows are the logits.
        teacher: the same of the teacher, which get no gradient, or its most likely tokens (then a divergence is that of
            `losses.top_k`), or rows in other tokens (`losses.other_tokens`), or the rows of several teachers
            (`losses.several`) or of a head that ranks share (`losses.vocabulary_shards`), which must all call this
            function with the same terms and sizes; None if no term uses a divergence.
        labels_N: the token id that each row predicts; IGNORE_INDEX is not allowed.
        terms: the C terms.
        factors: (C,), the factor of each sum in the total.
        vocabulary: only the first `vocabulary` logits are used, for models whose vocabularies are padded to different
            sizes; None uses all.
        chunk: rows of a chunk (half as many for the teacher's logits); the default depends on the device.

    Returns:
        The total and the sums, at least fp32.

    Raises:
        RuntimeError: in a second backward pass, or in a backward pass with create_graph=True.
    """
    # Before no_grad, within which is_grad_enabled is False.
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in student.tensors]
    # Its logits would be computed, and read by no term.
    if all(term.divergence is None for term in terms):
        teacher = None
    with torch.no_grad():
        head = cut(student, vocabulary)
        dtype = head.rows.dtype
        exact = torch.promote_types(dtype, torch.float32)
        if chunk is None:
            chunk = _CPU_CHUNK
            if student.rows.device.type != "cpu":
                # Bytes of an element.
                size = (student.rows if student.weight is None else student.weight).element_size()
                chunk = max(1, _CUDA_CHUNK_BYTES // (size * max(1, _vocabulary_size(head))))
        num_rows = end = len(head.rows)
        if not (teacher is None or isinstance(teacher, HeadInputs | OtherTokens | TopK)):
            teacher = teacher.cut(vocabulary)
            end = teacher.num_rows  # more than there are here, if the ranks share the head and another has more rows
        half = (min(chunk, end) + 1) // 2
        # Returns the teacher's side of some rows, at most `half` of them: the teacher's logits of a full chunk would
        # double the memory, while the student's products are faster on larger chunks.
        teacher_at: Callable[[slice], Tensor | TopK | SpanRows] | None = None
        scales = head.scale, LogitScale()
        if isinstance(teacher, HeadInputs):
            teacher_head = cut(teacher, vocabulary)
            scales = head.scale, teacher_head.scale
            buffer = teacher_head.rows.new_empty(half, _vocabulary_size(teacher_head))
            teacher_at = partial(_compute_outputs, teacher_head, buffer=buffer)
        elif isinstance(teacher, OtherTokens):
            # `vocabulary` counts tokens of the student; this teacher has other ones.
            other_tokens = teacher._replace(head=cut(teacher.head, None))
            teacher_at = SpanRows.of(head, other_tokens, labels_N, terms, exact).at
        elif isinstance(teacher, TopK):
            teacher_at = teacher.at
        elif teacher is not None:
            teacher_at = teacher.logits_at
        factors = factors.to(device=head.rows.device, dtype=exact, non_blocking=True)
        bound, unit = BoundTokenTerms(terms, factors), None
        if dtype == torch.float16:
            # fp16 would lose derivatives as small as 1 / count, so the backward pass multiplies by `unit`.
            unit = factors.abs().max().clamp(min=torch.finfo(exact).tiny)
            bound = BoundTokenTerms(terms, factors / unit)
        gradients = _Gradients.of(student, needs, exact)
        sums = torch.zeros_like(factors)
        buffer = head.rows.new_empty(2 * half, _vocabulary_size(head))
        chunk_losses = choose_chunk_losses(buffer, teacher, bound, scales=scales, with_gradient=any(needs))
        for start in range(0, end, 2 * half or 1):  # a step of 0, for no rows, would be an error
            stop = min(start + 2 * half, end)
            chunk_rows = slice(min(start, num_rows), min(stop, num_rows))
            outputs_NV = _compute_outputs(head, chunk_rows, buffer)
            for first in range(start, stop, half):
                here = slice(first, min(first + half, stop))
                of_teacher = None if teacher_at is None else teacher_at(here)
                part_NV = outputs_NV[first - start : here.stop - start]
                sums += chunk_losses(part_NV, of_teacher, labels_N[here])
            gradients.add(head, outputs_NV, chunk_rows)  # chunk_losses has replaced the outputs by derivatives
        total = (sums * factors).sum()
    return TokenLosses(_KnownGradients.apply(total, gradients, unit, *student.tensors), sums)


class _KnownGradients(torch.autograd.Function):
    """Gives rows, weight and bias the gradients that were computed together with the total."""

    @staticmethod
    def forward(
        ctx: Any, total: Tensor, gradients: _Gradients, unit: Tensor | None, *_student: Tensor | None
    ) -> Tensor:
        # Neither the gradients nor the weight go through save_for_backward: a gradient without another reference
        # becomes the parameter's gradient without a copy, and ZeRO-3 may release the weight.
        ctx.gradients, ctx.unit = gradients, unit
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        (of_total,) = incoming
        # Gradients are on during a backward pass only with create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError("the losses on tokens cannot be differentiated twice (create_graph=True)")
        if ctx.gradients is None:
            raise RuntimeError("the losses on tokens have one backward pass, and handed over their gradients in it")
        gradients, ctx.gradients = ctx.gradients, None
        scale = of_total if ctx.unit is None else of_total * ctx.unit
        return None, None, None, *gradients.scaled(scale)  # none for total, gradients and unit


@dataclass
class _Gradients:
    """The gradients of rows, weight and bias, each in the shape of its tensor; None if it is not required.

    Without a weight the rows are the logits.
    """

    rows: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    types: tuple[torch.dtype, ...]
    """The dtypes that the gradients of rows, weight and bias are cast to at the end."""
    empty: bool = True

    @classmethod
    def of(cls, head_inputs: HeadInputs, needs: Sequence[bool], exact: torch.dtype) -> _Gradients:
        dtype = head_inputs.rows.dtype if head_inputs.weight is None else head_inputs.weight.dtype
        empty = (
            torch.zeros_like if head_inputs.weight is None else torch.empty_like
        )  # logits beyond the vocabulary get none
        rows = empty(head_inputs.rows, dtype=dtype) if needs[0] else None
        weight = (
            # Summed over all chunks in at least fp32, and rounded once.
            None if head_inputs.weight is None or not needs[1] else torch.empty_like(head_inputs.weight, dtype=exact)
        )
        bias = None if head_inputs.bias is None or not needs[2] else torch.zeros_like(head_inputs.bias, dtype=exact)
        return cls(rows, weight, bias, tuple(dtype if x is None else x.dtype for x in head_inputs.tensors))

    def add(self, student: HeadInputs, derivative_NV: Tensor, here: slice) -> None:
        """Add the gradients from some rows, given the derivative with respect to the head's outputs."""
        if self.rows is not None and student.weight is None:
            self.rows[here, : derivative_NV.shape[1]] = derivative_NV
        elif self.rows is not None and student.weight is not None:
            torch.mm(derivative_NV, student.weight, out=self.rows[here])
        if self.weight is not None:
            weight_VK, rows_NK, words = self.weight, student.rows[here], derivative_NV.shape[1]
            if self.empty:  # with equal dtypes the first product overwrites its part of the memory
                (weight_VK[words:] if weight_VK.dtype == rows_NK.dtype else weight_VK).zero_()
            if weight_VK.dtype == rows_NK.dtype:
                weight_VK[:words].addmm_(derivative_NV.T, rows_NK, beta=0 if self.empty else 1)
            else:
                for start in range(0, words, _SLAB):
                    slab = slice(start, min(start + _SLAB, words))
                    weight_VK[slab] += derivative_NV[:, slab].T @ rows_NK
            self.empty = False
        if self.bias is not None:
            self.bias[: derivative_NV.shape[1]] += derivative_NV.sum(0, dtype=self.bias.dtype)

    def scaled(self, scale: Tensor) -> list[Tensor | None]:
        """Return the gradients times a scalar, each cast to its dtype. Works in place, so call it only once."""
        if self.empty and self.weight is not None:
            self.weight.zero_()
        gradients = [self.rows, self.weight, self.bias]
        # Without a reference here, autograd may take a gradient as it is (see `forward`).
        self.rows = self.weight = self.bias = None
        if scale.device.type != "cpu" or scale != 1:  # usually 1; on CUDA the host would wait to compare
            gradients = [None if x is None else x.mul_(scale) for x in gradients]
        return [None if x is None else x.to(kind) for x, kind in zip(gradients, self.types, strict=True)]


def cut(head: HeadInputs, vocabulary: int | None) -> HeadInputs:
    """Restrict a head to the first `vocabulary` tokens, with rows and bias in the dtype of the weight."""
    if head.weight is None:
        return head._replace(rows=head.rows[:, :vocabulary])
    bias_V = None if head.bias is None else head.bias[:vocabulary].to(head.weight.dtype)
    return HeadInputs(head.rows.to(head.weight.dtype), head.weight[:vocabulary], bias_V, head.scale)


def _compute_outputs(head: HeadInputs, here: slice, buffer: Tensor) -> Tensor:
    """Write the head's outputs for some rows, (n, V), to the buffer, and return them; `head.scale` is not applied."""
    rows_NK = head.rows[here]
    out = buffer[: len(rows_NK)]
    if head.weight is None:
        return out.copy_(rows_NK)
    if head.bias is None:
        return torch.mm(rows_NK, head.weight.T, out=out)
    return torch.addmm(head.bias, rows_NK, head.weight.T, out=out)


def _vocabulary_size(head: HeadInputs) -> int:
    return head.rows.shape[1] if head.weight is None else len(head.weight)
