"""How far two models agree on the tokens of answers: figures beside the losses, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from llmdistill.batch import HeadInputs, OtherTokens, TeacherRows, TopK
from llmdistill.losses.divergence import FORWARD_KL
from llmdistill.losses.head import token_losses
from llmdistill.losses.other_tokens import exact_logits
from llmdistill.losses.terms import TokenTerm

_CHUNK = 256
"""Rows whose logits are in memory at a time."""


def top_tokens(teacher: TeacherRows, k: int, vocabulary: int | None) -> Tensor | None:
    """Return a teacher's most likely tokens, (N, k); None if fewer are known, or if it has another tokenizer."""
    if isinstance(teacher, TopK):
        return teacher.tokens[:, :k] if teacher.tokens.shape[1] >= k else None
    if isinstance(teacher, OtherTokens):
        return None
    if isinstance(teacher, HeadInputs):
        parts = [exact_logits(teacher, here) for here in _split_rows(teacher)]
    else:
        # Before teachers are averaged, so that logits of padded vocabularies take no probability.
        rows = teacher.cut(vocabulary)
        parts = [rows.logits_at(slice(start, start + _CHUNK)) for start in range(0, rows.num_rows, _CHUNK)]
    return torch.cat([part_nV[:, :vocabulary].topk(k).indices for part_nV in parts])


def count_shared(student: HeadInputs, teacher_Nk: Tensor, vocabulary: int | None) -> Tensor:
    """Count, over all rows, the student's k most likely tokens that are among the teacher's k; a scalar."""
    k, count = teacher_Nk.shape[1], teacher_Nk.new_zeros(())
    for here in _split_rows(student):
        own_nk = exact_logits(student, here)[:, :vocabulary].topk(k).indices
        # (n, k, k): each of the student's tokens against each of the teacher's.
        count += (own_nk[:, :, None] == teacher_Nk[here, None, :]).sum()
    return count


def log_probs_of(student: HeadInputs, labels_N: Tensor) -> Tensor:
    """Return the log-probability of the token that each row predicts, (N,), at least fp32."""
    rows = [
        exact_logits(student, here).log_softmax(-1).gather(1, labels_N[here, None])[:, 0]
        for here in _split_rows(student)
    ]
    return torch.cat(rows)


def divergence_from(exact: HeadInputs, other: HeadInputs) -> Tensor:
    """Return Σ KL(exact ‖ other) over all rows, in nats: a scalar, at least fp32."""
    labels_N = torch.zeros(len(exact.rows), dtype=torch.int64, device=exact.rows.device)  # a divergence reads no label
    one = torch.ones(1, device=exact.rows.device)
    with torch.no_grad():
        return token_losses(other, exact, labels_N, [TokenTerm("kl", FORWARD_KL)], one).sums[0]


def _split_rows(head: HeadInputs) -> list[slice]:
    return [slice(start, start + _CHUNK) for start in range(0, len(head.rows), _CHUNK)]
