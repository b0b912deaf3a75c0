"""Losses on whole sequences: next sentence, class or score.

Each loss is the sum over the sequences with a target, and their number. Logits are (B, C), scores (B, 1). `has_target`
is (B,), bool: the sequences to sum over. Sequences without a target are computed too, as zeros: selecting the others
would make the host wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, LossSum
from llmdistill.losses.divergence import SOFT_CROSS_ENTROPY, log_softmax


def sequence_cross_entropy(logits: Tensor, targets: Tensor) -> LossSum:
    """Cross-entropy of the classes; the targets are (B,), int64, IGNORE_INDEX if there is no target."""
    has_target = targets != IGNORE_INDEX
    loss = functional.cross_entropy(_cleared(logits, has_target), targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return LossSum(loss, has_target.sum())


def sequence_mse(logits: Tensor, targets: Tensor) -> LossSum:
    """Squared error of the scores; the targets are (B,), floating point, NaN if there is no target."""
    return sequence_score_mse(logits, targets[:, None], ~targets.isnan())


def sequence_score_mse(student: Tensor, teacher: Tensor, has_target: Tensor) -> LossSum:
    """Squared error between the scores of student and teacher."""
    assert student.shape == teacher.shape == (len(has_target), 1), f"{tuple(student.shape)}, {tuple(teacher.shape)}"
    error_B1 = _cleared(student, has_target) - _cleared(teacher, has_target)
    return LossSum(error_B1.square().sum(), has_target.sum())


def sequence_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    has_target: Tensor,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float = 1.0,
) -> LossSum:
    """A divergence of the softened distributions over classes, times t², as in `output_divergence` over tokens.

    Args:
        student_logits: (B, C).
        teacher_logits: (B, C).
        has_target: the sequences to sum over.
        divergence: a function of log p (teacher) and log q (student), both (N, C), that returns (N,).
        temperature: t, greater than 0.
    """
    log_p_BC, log_q_BC = (
        log_softmax(_cleared(logits, has_target) / temperature) for logits in (teacher_logits, student_logits)
    )
    values_B = torch.where(has_target, divergence(log_p_BC, log_q_BC), 0.0)
    return LossSum(temperature**2 * values_B.sum(), has_target.sum())


def sequence_soft_cross_entropy(
    student_logits: Tensor, teacher_logits: Tensor, has_target: Tensor, *, temperature: float = 1.0
) -> LossSum:
    """MaKD eq. 18 on the next-sentence or class logits: CE(softmax(z^T/t), log softmax(z^S/t)), without t²."""
    loss = sequence_divergence(
        student_logits, teacher_logits, has_target, divergence=SOFT_CROSS_ENTROPY.value, temperature=temperature
    )
    return LossSum(loss.sum / temperature**2, loss.count)


def _cleared(logits_BC: Tensor, has_target: Tensor) -> Tensor:
    """The logits in at least fp32, with zeros for sequences without a target, whose logits may be NaN."""
    return torch.where(has_target[:, None], logits_BC, 0.0).to(torch.promote_types(logits_BC.dtype, torch.float32))
