"""Losses of what is said of a whole sequence: next sentence, class or score. Each is a sum over those with a target."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llmdistill.batch import IGNORE_INDEX, LossSum
from llmdistill.losses.divergence import output_divergence
from llmdistill.losses.logits import label_cross_entropy, rows_of, soft_cross_entropy

# The losses on classes are those on words, of sequences that are one word long.


def sequence_cross_entropy(logits: Tensor, targets: Tensor) -> LossSum:
    """Cross-entropy of the classes.

    Args:
        logits: (B, C).
        targets: (B,), int64, IGNORE_INDEX where none.

    Returns:
        The sum over sequences with a target, and their number.
    """
    return label_cross_entropy(logits[:, None], targets[:, None], shift=False)


def sequence_mse(logits: Tensor, targets: Tensor) -> LossSum:
    """Squared error of the scores.

    Args:
        logits: (B, 1).
        targets: (B,), floating point, NaN where none.

    Returns:
        The sum over sequences with a target, and their number.
    """
    return sequence_score_mse(logits, targets[:, None], ~targets.isnan())


def sequence_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    has_target: Tensor,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float = 1.0,
) -> LossSum:
    """A divergence of the softened distributions over classes, times t², as `output_divergence` has it over words.

    Args:
        student_logits: (B, C).
        teacher_logits: (B, C).
        has_target: (B,), bool: the sequences that count; what their target is does not matter.
        divergence: a function of log p (teacher) and log q (student), both (N, C), that gives (N,).
        temperature: t, over zero.

    Returns:
        The sum over these sequences, and their number.
    """
    return output_divergence(
        student_logits[:, None],
        teacher_logits[:, None],
        _as_labels(has_target),
        divergence=divergence,
        temperature=temperature,
        shift=False,
    )


def sequence_soft_cross_entropy(
    student_logits: Tensor, teacher_logits: Tensor, has_target: Tensor, *, temperature: float = 1.0
) -> LossSum:
    """MaKD eq. 18 on the next-sentence or class logits: CE(softmax(z^T/t), log softmax(z^S/t)), without t².

    Args:
        student_logits: (B, C).
        teacher_logits: (B, C).
        has_target: (B,), bool: the sequences that count; what their target is does not matter.
        temperature: t, over zero.

    Returns:
        The sum over these sequences, and their number.
    """
    return soft_cross_entropy(
        student_logits[:, None],
        teacher_logits[:, None],
        _as_labels(has_target),
        temperature=temperature,
        shift=False,
    )


def sequence_score_mse(student: Tensor, teacher: Tensor, has_target: Tensor) -> LossSum:
    """Squared error between the scores of student and teacher.

    Args:
        student: (B, 1).
        teacher: (B, 1).
        has_target: (B,), bool: the sequences that count.

    Returns:
        The sum over these sequences, and their number.
    """
    assert student.shape == teacher.shape == (len(has_target), 1), f"{tuple(student.shape)}, {tuple(teacher.shape)}"
    error_N1 = rows_of(student, has_target) - rows_of(teacher, has_target)
    return LossSum(error_N1.square().sum(), has_target.sum())


def _as_labels(has_target: Tensor) -> Tensor:
    """(B, 1): one position a sequence, to be learnt where there is a target."""
    return torch.where(has_target, 0, IGNORE_INDEX)[:, None]
