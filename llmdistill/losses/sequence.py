"""Losses on whole sequences: next sentence, class, score, span or embedding.

Each loss is the sum over the sequences with a target, and their number. Logits are (B, C), scores (B, 1). A sequence
with K targets, such as the start and the end of a span, has the logits (B, K, C), and its loss is the mean over the K
targets, as in BERT. Logits of -inf are classes that the sequence does not have. `has_target` is (B,), bool: the
sequences to sum over. Sequences without a target are computed too, as zeros: selecting the others would make the host
wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, LossSum
from llmdistill.losses.divergence import SOFT_CROSS_ENTROPY, log_softmax


def sequence_cross_entropy(logits: Tensor, targets: Tensor) -> LossSum:
    """Cross-entropy of the classes; the targets are (B,) or (B, K), int64, IGNORE_INDEX if there is no target.

    A sequence has all of its K targets, or none.
    """
    assert logits.shape[:-1] == targets.shape, f"{tuple(logits.shape)}, {tuple(targets.shape)}"
    # One of the K targets tells of all.
    has_target = targets.flatten(1)[:, 0] != IGNORE_INDEX if targets.dim() > 1 else targets != IGNORE_INDEX
    loss = functional.cross_entropy(
        _clear_unknown(logits, has_target).flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    # The mean over the targets of a sequence (the two ends of a span), as transformers' heads compute it.
    return LossSum(loss / (targets.shape[1] if targets.dim() > 1 else 1), has_target.sum())


def sequence_mse(logits: Tensor, targets: Tensor) -> LossSum:
    """Squared error of the scores; the targets are (B,), floating point, NaN if there is no target."""
    return sequence_score_mse(logits, targets[:, None], ~targets.isnan())


def sequence_score_mse(student: Tensor, teacher: Tensor, has_target: Tensor) -> LossSum:
    """Squared error between the scores of student and teacher."""
    assert student.shape == teacher.shape == (len(has_target), 1), f"{tuple(student.shape)}, {tuple(teacher.shape)}"
    error_B1 = _clear_unknown(student, has_target) - _clear_unknown(teacher, has_target)
    return LossSum(error_B1.square().sum(), has_target.sum())


def sequence_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    has_target: Tensor,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float = 1.0,
) -> LossSum:
    """Sum a divergence of the softened distributions over classes, times t², as `output_divergence` does over tokens.

    Args:
        student_logits: (B, C) or (B, K, C).
        teacher_logits: the same shape.
        has_target: the sequences to sum over.
        divergence: a function of log p (teacher) and log q (student), both (N, C), that returns (N,).
        temperature: t, greater than 0.
    """
    log_p_NC, log_q_NC = (
        log_softmax(_clear_unknown(logits, has_target).flatten(0, -2) / temperature)
        for logits in (teacher_logits, student_logits)
    )
    values_B = divergence(log_p_NC, log_q_NC).view(len(has_target), -1).mean(1)
    # Zeros as logits do not always give 0: the cross-entropy of two uniform distributions is log C.
    values_B = torch.where(has_target, values_B, 0.0)
    return LossSum(temperature**2 * values_B.sum(), has_target.sum())


def sequence_soft_cross_entropy(
    student_logits: Tensor, teacher_logits: Tensor, has_target: Tensor, *, temperature: float = 1.0
) -> LossSum:
    """MaKD eq. 18 on the next-sentence or class logits: CE(softmax(z^T/t), log softmax(z^S/t)), without t²."""
    loss = sequence_divergence(
        student_logits, teacher_logits, has_target, divergence=SOFT_CROSS_ENTROPY.value, temperature=temperature
    )
    return LossSum(loss.sum / temperature**2, loss.count)


def sequence_embedding_cosine(student: Tensor, teacher: Tensor, has_target: Tensor) -> LossSum:
    """1 - cos between the embeddings of student and teacher, (B, W); an embedding of zeros has the cosine 0."""
    assert student.shape == teacher.shape, f"{tuple(student.shape)}, {tuple(teacher.shape)}"
    # An unknown embedding, which may be NaN, becomes zeros with a finite gradient; the last line drops that gradient.
    cosine_B = functional.cosine_similarity(
        _clear_unknown(student, has_target), _clear_unknown(teacher, has_target), dim=-1
    )
    return LossSum(torch.where(has_target, 1 - cosine_B, 0.0).sum(), has_target.sum())


def sequence_embedding_mse(student: Tensor, teacher: Tensor, has_target: Tensor) -> LossSum:
    """Squared error between the embeddings of student and teacher, (B, W), as the mean over the width."""
    assert student.shape == teacher.shape, f"{tuple(student.shape)}, {tuple(teacher.shape)}"
    error_BW = _clear_unknown(student, has_target) - _clear_unknown(teacher, has_target)
    return LossSum(error_BW.square().mean(-1).sum(), has_target.sum())


def sequence_margin_mse(student: Tensor, teacher: Tensor, place: Tensor) -> LossSum:
    """MarginMSE (Hofstätter et al. 2020): squared error between the margins of student and teacher.

    A triple has the margin q·p - q·n of its embeddings. The mean over the triples is the sum by the count.

    Args:
        student: (B, W), the embeddings; query, positive and negative of a triple follow each other.
        teacher: (B, W'), W' may differ from W.
        place: (B,), 0, 1 and 2 in a triple; 0 for a sentence without one, and IGNORE_INDEX for one that does not count.
    """
    is_positive = place == 1
    error_B = _compute_margins(student, is_positive) - _compute_margins(teacher, is_positive)
    # The count is that of all sentences, as of the other terms, and each triple has three.
    return LossSum(3 * error_B.square().sum(), (place != IGNORE_INDEX).sum())


def _compute_margins(embeddings_BW: Tensor, is_positive_B: Tensor) -> Tensor:
    """Return the margins at the positives, and 0 elsewhere, where the neighbors are no triple."""
    embeddings_BW = embeddings_BW.to(torch.promote_types(embeddings_BW.dtype, torch.float32))
    # A positive stands between its query (the row before) and its negative (the row after).
    query_BW, negative_BW = embeddings_BW.roll(1, 0), embeddings_BW.roll(-1, 0)
    difference_BW = torch.where(is_positive_B[:, None], embeddings_BW - negative_BW, 0.0)
    return (torch.where(is_positive_B[:, None], query_BW, 0.0) * difference_BW).sum(-1)


def _clear_unknown(logits: Tensor, has_target: Tensor) -> Tensor:
    """Return the logits in at least fp32, with zeros for sequences without a target, whose logits may be NaN."""
    known = has_target.view(-1, *[1] * (logits.dim() - 1))
    return torch.where(known, logits, 0.0).to(torch.promote_types(logits.dtype, torch.float32))
