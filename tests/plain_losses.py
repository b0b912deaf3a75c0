"""The losses the plain way, by autograd: attention and relations with matrices of (B, H, T, T), tokens with all logits.

What the tests hold the package's own losses against, and what bench_losses times them against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.attention_mask import AttentionMask
from llmdistill.batch import LossSum
from llmdistill.losses.attention import AttentionInputs, Direction, RelationInputs, repeat_heads, side_by_side
from llmdistill.losses.divergence import LOG_FLOOR
from llmdistill.losses.head import HeadInputs, TokenLosses
from llmdistill.losses.terms import TokenTerm


def token_losses_plain(
    student: HeadInputs,
    teacher: HeadInputs | None,
    labels_N: Tensor,
    terms: Sequence[TokenTerm],
    factors: Tensor,
    *,
    vocabulary: int | None = None,
    chunk: int | None = None,
) -> TokenLosses:
    """`head.token_losses` from the full (N, V) logits of both models; `chunk` does nothing here."""
    student_NV = _logits(student, vocabulary)
    with torch.no_grad():
        teacher_NV = None if teacher is None else _logits(teacher, vocabulary)
    sums = []
    for term in terms:
        if term.divergence is None:
            on_labels = functional.cross_entropy(student_NV, labels_N, reduction="sum")
            evenly = -student_NV.log_softmax(-1).clamp(min=LOG_FLOOR).mean(-1).sum() if term.smoothing > 0 else 0
            sums.append((1 - term.smoothing) * on_labels + term.smoothing * evenly)
            continue
        assert teacher_NV is not None
        log_p_NV = (teacher_NV / term.temperature).log_softmax(-1).clamp(min=LOG_FLOOR)
        log_q_NV = (student_NV / term.temperature).log_softmax(-1).clamp(min=LOG_FLOOR)
        sums.append(term.scale * term.divergence.value(log_p_NV, log_q_NV).sum())
    sums_C = torch.stack(sums)
    return TokenLosses((sums_C * factors).sum(), sums_C.detach())


def _logits(inputs: HeadInputs, vocabulary: int | None) -> Tensor:
    if inputs.weight is None:  # the rows are the logits
        return inputs.rows[:, :vocabulary]
    bias_V = None if inputs.bias is None else inputs.bias[:vocabulary]
    logits_NV = functional.linear(inputs.rows.to(inputs.weight.dtype), inputs.weight[:vocabulary], bias_V)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) * inputs.scale.factor
    return logits_NV if inputs.scale.cap is None else inputs.scale.cap * (logits_NV / inputs.scale.cap).tanh()


def attention_kl_plain(
    student: AttentionInputs,
    teacher: AttentionInputs,
    mask: AttentionMask,
    *,
    direction: Direction = "student_teacher",
) -> LossSum:
    """`attention.attention_kl`, by autograd."""
    real_BT, visible_B1TT = mask.segments_BT != 0, visible_keys(mask)
    p_BHTT, q_BHTT = (
        attention_scores(each, real_BT).masked_fill(~visible_B1TT, -torch.inf).log_softmax(-1)
        for each in ((student, teacher) if direction == "student_teacher" else (teacher, student))
    )
    # Where a key is not visible both logarithms are -inf and their difference is NaN; its share is zero.
    log_ratio_BHTT = torch.where(visible_B1TT, p_BHTT - q_BHTT, 0.0)
    kl_BT = (p_BHTT.exp() * log_ratio_BHTT).sum(-1).mean(1)
    return LossSum(torch.where(real_BT, kl_BT, 0.0).sum(), real_BT.sum())


def attention_score_mse_plain(student: AttentionInputs, teacher: AttentionInputs, mask: AttentionMask) -> LossSum:
    """`attention.attention_score_mse`, by autograd."""
    real_BT, visible_B1TT = mask.segments_BT != 0, visible_keys(mask)
    error_BHTT = attention_scores(student, real_BT) - attention_scores(teacher, real_BT)
    squares_BHT = torch.where(visible_B1TT, error_BHTT, 0.0).square().sum(-1)
    # The scores of a padded query are 0 in both models, so it adds nothing.
    return LossSum((squares_BHT / visible_B1TT.sum(-1)).mean(1).sum(), real_BT.sum())


def relation_kl_plain(
    student: RelationInputs, teacher: RelationInputs, mask: AttentionMask, *, relation_heads: int
) -> LossSum:
    """`relation.relation_kl`, by autograd."""

    def relation(sides: RelationInputs) -> AttentionInputs:
        heads = max(sides.left.shape[1], sides.right.shape[1])
        left_BTF, right_BTF = (side_by_side(repeat_heads(side, heads)) for side in sides)
        left_BRTD, right_BRTD = (x.unflatten(-1, (relation_heads, -1)).transpose(1, 2) for x in (left_BTF, right_BTF))
        return AttentionInputs(left_BRTD, right_BRTD, left_BRTD.shape[-1] ** -0.5)

    return attention_kl_plain(relation(student), relation(teacher), mask, direction="teacher_student")


def visible_keys(mask: AttentionMask) -> Tensor:
    """Which key (last axis) each query may look at: (B, 1, T, T), True where it may.

    Padded queries look at everything, so that their softmax is a number; nobody uses it.
    """
    segments_BT = mask.segments_BT
    real_BT = segments_BT != 0
    position_T = torch.arange(segments_BT.shape[1], device=segments_BT.device)
    distance_TT = position_T[:, None] - position_T[None, :]
    visible_BTT = real_BT[:, None, :] & (segments_BT[:, :, None] == segments_BT[:, None, :])
    if mask.causal:
        visible_BTT = visible_BTT & (distance_TT >= 0)
    if mask.window is not None:
        visible_BTT = visible_BTT & (distance_TT < mask.window)
    return (visible_BTT | ~real_BT[:, :, None])[:, None]


def attention_scores(inputs: AttentionInputs, real_BT: Tensor) -> Tensor:
    """Scaled products of queries and keys: (B, H, T, T) in at least fp32; 0 where either is padding."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    # Cleared before the product: a masked score alone would still let a padded row's NaN into the other's gradient.
    query_BHTD, key_BGTD = (torch.where(real_BT[:, None, :, None], each, 0.0).to(dtype) for each in inputs[:2])
    key_BHTD = repeat_heads(key_BGTD, query_BHTD.shape[1])
    return query_BHTD @ key_BHTD.transpose(-1, -2) * inputs.scaling
