"""What `losses.head` computes, with all logits at once and by autograd: the reference of tests and benches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.losses.divergence import LOG_FLOOR
from llmdistill.losses.head import HeadInputs, TokenTerm


def word_losses_plain(
    student: HeadInputs,
    teacher: HeadInputs | None,
    labels_N: Tensor,
    terms: Sequence[TokenTerm],
    factors: Tensor,
    *,
    vocabulary: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """`token_losses` from the full (N, V) logits of both; `factors` and `chunk` have nothing to say here."""
    student_NV = _logits(student, vocabulary)
    with torch.no_grad():
        teacher_NV = None if teacher is None else _logits(teacher, vocabulary)
    sums = []
    for term in terms:
        if term.divergence is None:
            sums.append(functional.cross_entropy(student_NV, labels_N, reduction="sum"))
            continue
        assert teacher_NV is not None
        log_p_NV = (teacher_NV / term.temperature).log_softmax(-1).clamp(min=LOG_FLOOR)
        log_q_NV = (student_NV / term.temperature).log_softmax(-1).clamp(min=LOG_FLOOR)
        sums.append(term.scale * term.divergence.value(log_p_NV, log_q_NV).sum())
    return torch.stack(sums)


def _logits(head: HeadInputs, vocabulary: int | None) -> Tensor:
    bias_V = None if head.bias is None else head.bias[:vocabulary]
    logits_NV = functional.linear(head.rows.to(head.weight.dtype), head.weight[:vocabulary], bias_V)
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
