"""The loss of each row of a block of attention scores, and its derivative with respect to the student's scores.

Letters: S sequences, H heads, L rows (queries), J keys of a block.
"""

from __future__ import annotations

from functools import reduce
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from llmdistill.attention_mask import AttentionMask

AttentionKind = Literal["student_teacher", "teacher_student", "score_mse"]
"""KL(A^S‖A^T) (MaKD eq. 12), KL(A^T‖A^S) (MiniLM eq. 3), or the squared error of the scores (TinyBERT eq. 7)."""

HIDDEN = -1e30
"""Added to the score of a key that a query must not see. The score is lost in rounding, so that student and teacher
differ by exactly 0 there and the softmax is negligible, without the NaN of -inf - -inf."""

_NOTHING = -60.0
"""Lower bound of log shares: exp of it is negligible beside 1 even in fp64, but does not underflow."""


class RowLosses(NamedTuple):
    """The losses of a block's rows; the buffer of the student's scores then holds the derivative."""

    value: Tensor
    """(S, H, L, 1)."""
    factor: Tensor
    """Broadcasts to (S, H, L, 1): factor that the derivative of each row must still be multiplied by."""


class Hidden(NamedTuple):
    """The keys of a block that its queries do not see."""

    first: int
    """Index within the block: all queries of the block see all keys before this index."""
    bias: Tensor
    """(S or 1, 1, L, J - first): HIDDEN where not seen, else 0."""


def hidden_keys(mask: AttentionMask, rows: slice, keys: slice, *, one_segment: bool, like: Tensor) -> Hidden | None:
    """Return the keys that a block's queries do not see; None if they see all keys.

    Args:
        mask: that of the block's sequences. Padding sees padding, so that its softmax is not NaN.
        rows: positions of the queries.
        keys: positions of the keys; if causal, none is after the last query.
        one_segment: whether all tokens are in one segment, so that segments hide nothing.
        like: tensor with the device and dtype of the result.
    """
    causal, window, segments_ST = mask.causal, mask.window, mask.segments_BT
    if causal and one_segment and window is None and not mask.has_limits:
        # Every query of the block sees the keys before its first query, so that only the block's end needs a bias.
        size = rows.stop - rows.start
        return Hidden(rows.start - keys.start, like.new_full((1, 1, size, size), HIDDEN).triu_(1))
    hidden: list[Tensor] = []
    if not one_segment:
        hidden.append(segments_ST[:, None, rows, None] != segments_ST[:, None, None, keys])  # (S, 1, L, J)
    if mask.visible_until_BT is not None:
        key_J = torch.arange(keys.start, keys.stop, device=like.device)
        hidden.append(key_J >= mask.visible_until_BT[:, None, rows, None])
    if causal or window is not None:
        query_L1 = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
        distance_11LJ = (query_L1 - torch.arange(keys.start, keys.stop, device=like.device))[None, None]
        hidden += [distance_11LJ < 0] if causal else []
        hidden += [distance_11LJ >= window] if window is not None else []
    if not hidden:
        return None
    hidden_S1LJ = reduce(torch.logical_or, hidden)
    return Hidden(0, hidden_S1LJ.to(like.dtype).mul_(HIDDEN))


def row_losses(
    kind: AttentionKind,
    student_SHLJ: Tensor,
    teacher_SHLJ: Tensor,
    spare_SHLJ: Tensor,
    hidden: Hidden | None,
    *,
    derivative: bool,
) -> RowLosses:
    """Compute the loss of each row from the scaled scores of both models; all three buffers are overwritten.

    `student_SHLJ` then holds the derivative; without `derivative`, its final content is undefined.
    """
    if hidden is not None:
        for scores in (student_SHLJ, teacher_SHLJ):
            scores[..., hidden.first :].add_(hidden.bias)
    if kind == "score_mse":
        keys = student_SHLJ.shape[-1]
        # Keys before `first` are never hidden, so those of the bias are all that counts.
        seen = keys if hidden is None else keys - (hidden.bias != 0).sum(-1, keepdim=True)
        # Mean of (s - t)² over the visible keys; its derivative is 2 (s - t) / number of visible keys.
        error = student_SHLJ.sub_(teacher_SHLJ)
        squares = torch.mul(error, error, out=spare_SHLJ).sum(-1, keepdim=True)
        return RowLosses(squares / seen, torch.full_like(squares, 2.0) / seen)
    # Distributions stay unnormalized, as exponentials e and their sum z. A factor that is constant in a row is applied
    # to the rows of the queries, which costs almost nothing; applied to the block it would cost one more pass over it.
    s, t = student_SHLJ, teacher_SHLJ
    most_student, most_teacher = s.amax(-1, keepdim=True), t.amax(-1, keepdim=True)
    if kind == "student_teacher":
        # KL(S‖T) = Σ_j p_j d_j - log Z_S + log Z_T with d = s - t; its derivative is p (d - Σ p d).
        e, z_student = _exponentiate(s, most_student, out=spare_SHLJ)
        d = s.sub_(t)
        _, z_teacher = _exponentiate(t, most_teacher, out=t)
        mean = d.mul_(e).sum(-1, keepdim=True) / z_student
        if derivative:
            s.addcmul_(e, mean, value=-1)  # s holds e d
        # log Z = maximum + log z.
        value = mean - (most_student - most_teacher) - (z_student.log() - z_teacher.log())
        return RowLosses(value, z_student.reciprocal())
    # KL(T‖S) = Σ_j q_j (t_j - s_j) - log Z_T + log Z_S with q the teacher's attention; its derivative is p - q.
    d = torch.sub(t, s, out=spare_SHLJ)
    _, z_student = _exponentiate(s, most_student, out=s)
    e, z_teacher = _exponentiate(t, most_teacher, out=t)
    mean = d.mul_(e).sum(-1, keepdim=True) / z_teacher
    if derivative:
        s.addcmul_(e, z_student / z_teacher, value=-1)  # times 1 / z_student this is p - q
    value = mean - (most_teacher - most_student) - (z_teacher.log() - z_student.log())
    return RowLosses(value, z_student.reciprocal())


def _exponentiate(scores: Tensor, most: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(score - maximum of the row), and its sum over the row."""
    # Clamp, because exponentials and products that underflow (denormals) are many times slower on CPUs.
    torch.sub(scores, most, out=out).clamp_(min=_NOTHING).exp_()
    return out, out.sum(-1, keepdim=True)
