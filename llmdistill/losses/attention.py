"""Attention of student and teacher, built from their queries and keys: its distributions, or the scores before them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmdistill.batch import LossSum


class AttentionInputs(NamedTuple):
    """What one layer's attention distribution is made of."""

    query: Tensor
    """(B, H, T, D)."""
    key: Tensor
    """(B, G, T, D); H is a multiple of G."""
    scaling: float
    """Factor on query·key before the softmax."""


def attention_kl(
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    direction: Literal["student_teacher", "teacher_student"] = "student_teacher",
) -> LossSum:
    """MaKD eq. 12: KL(A^S‖A^T) of one layer, mean over heads, summed over the queries of real tokens.

    Student and teacher need the same number of query heads H; head width D and key heads G may differ. This is the
    plain way, with matrices of (B, H, T, T).

    Args:
        student: queries and keys of the student.
        teacher: queries and keys of the teacher.
        attention_mask: (B, T), 1 at real tokens.
        causal: a token sees only itself and what stands before it.
        window: a token sees only the last so many positions, itself included; None for all.
        direction: student_teacher is KL(A^S‖A^T), MaKD's; teacher_student is KL(A^T‖A^S), MiniLM's.

    Returns:
        The sum over real queries of the mean over heads, and the number of real tokens.
    """
    assert student.query.shape[1] == teacher.query.shape[1], "student and teacher must have the same number of heads"
    real_BT = attention_mask.bool()
    visible_B1TT = visible_keys(real_BT, causal=causal, window=window)
    student_BHTT = attention_log_probs(student, real_BT, visible_B1TT)
    teacher_BHTT = attention_log_probs(teacher, real_BT, visible_B1TT)
    if direction == "student_teacher":
        p_BHTT, q_BHTT = student_BHTT, teacher_BHTT
    else:
        p_BHTT, q_BHTT = teacher_BHTT, student_BHTT
    # Where a key is not visible both logarithms are -inf and their difference is NaN; its share is zero.
    log_ratio_BHTT = torch.where(visible_B1TT, p_BHTT - q_BHTT, 0.0)
    kl_BT = (p_BHTT.exp() * log_ratio_BHTT).sum(-1).mean(1)
    return LossSum(torch.where(real_BT, kl_BT, 0.0).sum(), real_BT.sum())


def attention_score_mse(
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
) -> LossSum:
    """TinyBERT eq. 7: squared error of one layer's attention scores before the softmax, summed over real queries.

    KroneckerBERT's attention loss is the same. A query's error is the mean over the keys that it may look at, so that
    neither padding nor a mask changes its scale. Student and teacher need the same number of query heads H; head width
    D and key heads G may differ.

    Args:
        student: queries and keys of the student.
        teacher: queries and keys of the teacher.
        attention_mask: (B, T), 1 at real tokens.
        causal: a token sees only itself and what stands before it.
        window: a token sees only the last so many positions, itself included; None for all.

    Returns:
        The sum over real queries of the mean over heads and visible keys, and the number of real tokens.
    """
    assert student.query.shape[1] == teacher.query.shape[1], "student and teacher must have the same number of heads"
    real_BT = attention_mask.bool()
    visible_B1TT = visible_keys(real_BT, causal=causal, window=window)
    error_BHTT = attention_scores(student, real_BT) - attention_scores(teacher, real_BT)
    squares_BHT = torch.where(visible_B1TT, error_BHTT, 0.0).square().sum(-1)
    # The scores of a padded query are 0 in both models, so it adds nothing.
    return LossSum((squares_BHT / visible_B1TT.sum(-1)).mean(1).sum(), real_BT.sum())


def visible_keys(real_BT: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """Which key (last axis) each query may look at: (B, 1, T, T), True where it may.

    Padded queries look at everything, so that their softmax is a number; nobody uses it.
    """
    position_T = torch.arange(real_BT.shape[1], device=real_BT.device)
    distance_TT = position_T[:, None] - position_T[None, :]
    visible_BTT = real_BT[:, None, :].expand(-1, real_BT.shape[1], -1)
    if causal:
        visible_BTT = visible_BTT & (distance_TT >= 0)
    if window is not None:
        visible_BTT = visible_BTT & (distance_TT < window)
    return (visible_BTT | ~real_BT[:, :, None])[:, None]


def attention_log_probs(inputs: AttentionInputs, real_BT: Tensor, visible_B1TT: Tensor) -> Tensor:
    """Logarithm of the attention distribution (eq. 3): (B, H, T, T) in at least fp32, -inf where not visible."""
    return attention_scores(inputs, real_BT).masked_fill(~visible_B1TT, -torch.inf).log_softmax(-1)


def attention_scores(inputs: AttentionInputs, real_BT: Tensor) -> Tensor:
    """Scaled products of queries and keys: (B, H, T, T) in at least fp32; 0 where either is padding."""
    batch, heads, tokens, width = inputs.query.shape
    groups = inputs.key.shape[1]
    assert heads % groups == 0, f"{heads} query heads are no multiple of {groups} key heads"
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    # Cleared before the product: a masked score alone would still let a padded row's NaN into the other's gradient.
    query_BHTD = torch.where(real_BT[:, None, :, None], inputs.query, 0.0).to(dtype)
    key_BGTD = torch.where(real_BT[:, None, :, None], inputs.key, 0.0).to(dtype)
    # Head h reads key head h // (H/G): group the queries instead of repeating the keys.
    query_BGXTD = query_BHTD.reshape(batch, groups, heads // groups, tokens, width)
    scores_BHTT = (query_BGXTD @ key_BGTD[:, :, None].transpose(-1, -2)).reshape(batch, heads, tokens, tokens)
    return scores_BHTT * inputs.scaling
