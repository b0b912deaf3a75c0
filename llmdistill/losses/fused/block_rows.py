"""What a block of attention scores is worth: each row's loss, and the derivative by the student's scores.

Letters: S sequences, H heads, L rows (queries), J keys of a block.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["student_teacher", "teacher_student", "score_mse"]
"""KL(A^S‖A^T), KL(A^T‖A^S), or the squared error of the scores."""

HIDDEN = -1e30
"""Added to the score of a key that a query must not see. It swallows the score, so that student and teacher differ by
exactly 0 there and the softmax is as good as 0, without the NaN of -inf - -inf."""

_NOTHING = -60.0
"""Logarithm of a share too small to count beside 1, even in fp64, but not of one to underflow."""


class RowLosses(NamedTuple):
    """The losses of a block's rows; the derivative stands where the student's scores stood."""

    value: Tensor
    """(S, H, L, 1)."""
    factor: Tensor
    """Broadcasts to (S, H, L, 1): what the derivative of each row still lacks as a factor."""


class Hidden(NamedTuple):
    """Which keys of a block its queries do not see."""

    first: int
    """All keys before this one, counted in the block, are seen by all its queries."""
    bias: Tensor
    """(S or 1, 1, L, J - first): HIDDEN where not seen, else 0."""
    seen: Tensor
    """(S or 1, 1, L, 1): how many keys of the block each query sees."""


def hidden_keys(
    segments_ST: Tensor | None, rows: slice, keys: slice, *, causal: bool, window: int | None, like: Tensor
) -> Hidden | None:
    """Which keys a block's queries do not see; None where they see all.

    Args:
        segments_ST: number of each token's segment, 0 at padding; None if all are of one. Padding sees padding, so that
            its softmax is a number.
        rows: positions of the queries.
        keys: positions of the keys, none after the last query if causal.
        causal: a token sees only itself and what stands before it.
        window: a token sees only the last so many positions, itself included; None for all.
        like: gives device and type.
    """
    first = 0
    far_LJ = hidden_SLJ = None
    if causal and segments_ST is None and window is None:
        first = rows.start - keys.start
    if causal or window is not None:
        query_L1 = torch.arange(rows.start, rows.stop, device=like.device)[:, None]
        distance_LJ = query_L1 - torch.arange(keys.start + first, keys.stop, device=like.device)
        far_LJ = distance_LJ < 0 if causal else None
        if window is not None:
            beyond_LJ = distance_LJ >= window
            far_LJ = beyond_LJ if far_LJ is None else far_LJ | beyond_LJ
    if segments_ST is not None:
        hidden_SLJ = segments_ST[:, rows, None] != segments_ST[:, None, keys]
        far_LJ = hidden_SLJ if far_LJ is None else hidden_SLJ | far_LJ
    if far_LJ is None:
        return None
    hidden_S1LJ = far_LJ[None, None] if far_LJ.dim() == 2 else far_LJ[:, None]
    seen_S1L1 = (keys.stop - keys.start) - hidden_S1LJ.sum(-1, keepdim=True)
    return Hidden(first, hidden_S1LJ.to(like.dtype).mul_(HIDDEN), seen_S1L1)


def row_losses(
    kind: Kind,
    student_SHLJ: Tensor,
    teacher_SHLJ: Tensor,
    spare_SHLJ: Tensor,
    hidden: Hidden | None,
    *,
    derivative: bool,
) -> RowLosses:
    """Each row's loss; all three buffers are overwritten.

    Args:
        kind: which loss.
        student_SHLJ: scaled scores of the student; holds the derivative afterwards.
        teacher_SHLJ: scaled scores of the teacher.
        spare_SHLJ: room for as many.
        hidden: which of them do not count.
        derivative: whether the derivative is wanted; without it `student_SHLJ` holds anything.
    """
    if hidden is not None:
        for scores in (student_SHLJ, teacher_SHLJ):
            scores[..., hidden.first :].add_(hidden.bias)
    if kind == "score_mse":
        seen = student_SHLJ.shape[-1] if hidden is None else hidden.seen
        return _score_mse(student_SHLJ, teacher_SHLJ, spare_SHLJ, seen)
    if kind == "student_teacher":
        return _student_teacher(student_SHLJ, teacher_SHLJ, spare_SHLJ, derivative=derivative)
    return _teacher_student(student_SHLJ, teacher_SHLJ, spare_SHLJ, derivative=derivative)


# Distributions stay unnormalised, e and their sum z: what is constant in a row costs a pass over the block only if it
# is applied there, and next to nothing as a factor on the rows of the queries.


def _student_teacher(s: Tensor, t: Tensor, spare: Tensor, *, derivative: bool) -> RowLosses:
    """KL(S‖T) = Σ_j p_j d_j - log Z_S + log Z_T with d = s - t; its derivative is p (d - Σ p d)."""
    most_student, most_teacher = s.amax(-1, keepdim=True), t.amax(-1, keepdim=True)
    e, z_student = _exponentials(s, most_student, out=spare)
    d = s.sub_(t)
    _, z_teacher = _exponentials(t, most_teacher, out=t)
    mean = d.mul_(e).sum(-1, keepdim=True) / z_student
    if derivative:
        s.addcmul_(e, mean, value=-1)
    value = mean - (most_student - most_teacher) - (z_student.log() - z_teacher.log())
    return RowLosses(value, z_student.reciprocal())


def _teacher_student(s: Tensor, t: Tensor, spare: Tensor, *, derivative: bool) -> RowLosses:
    """KL(T‖S) = Σ_j q_j (t_j - s_j) - log Z_T + log Z_S with q the teacher's; its derivative is p - q."""
    most_student, most_teacher = s.amax(-1, keepdim=True), t.amax(-1, keepdim=True)
    d = torch.sub(t, s, out=spare)
    _, z_student = _exponentials(s, most_student, out=s)
    e, z_teacher = _exponentials(t, most_teacher, out=t)
    mean = d.mul_(e).sum(-1, keepdim=True) / z_teacher
    if derivative:
        s.addcmul_(e, z_student / z_teacher, value=-1)
    value = mean - (most_teacher - most_student) - (z_teacher.log() - z_student.log())
    return RowLosses(value, z_student.reciprocal())


def _exponentials(scores: Tensor, most: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor]:
    """exp(score - largest of the row), and its sum over the row."""
    # Processors are many times slower at exponentials and products that underflow than at others.
    torch.sub(scores, most, out=out).clamp_(min=_NOTHING).exp_()
    return out, out.sum(-1, keepdim=True)


def _score_mse(s: Tensor, t: Tensor, spare: Tensor, seen: Tensor | int) -> RowLosses:
    """Mean of (s - t)² over the keys that are seen; its derivative is 2 (s - t) / their number."""
    error = s.sub_(t)
    squares = torch.mul(error, error, out=spare).sum(-1, keepdim=True)
    return RowLosses(squares / seen, torch.full_like(squares, 2.0) / seen)
