"""Divergences from a teacher with another tokenizer, which has read the same text in its own tokens.

Where both have a token for the same bytes (a pair), a divergence of `losses.divergence` compares their distributions
over the K tokens that both know, with all other tokens together as one more class. A span that they cut into different
tokens is compared by one of two losses:

    alm   the likelihood of the whole span (ALM, arXiv 2503.20083): with p and q for the product of the probabilities of
          its tokens in teacher and student, raised to the power 1/τ, τ (p log(p/q) + (1-p) log((1-p)/(1-q)));
    uld   the distributions over its first token, sorted (ULD, arXiv 2402.12030): Σ |p_(i) - q_(i)|, the shorter one
          filled up with zeros.

The factor τ keeps the size of the first one: for large τ it becomes |log P| log(log P / log Q) - |log P| + |log Q|.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import HeadInputs, OtherTokens
from llmdistill.losses.divergence import LOG_FLOOR
from llmdistill.losses.terms import BoundTokenTerms, TokenTerm

TAU = 100.0
"""τ of the likelihoods of spans, as in the paper."""
_CHUNK = 256
"""Rows whose logits are computed at a time for the likelihoods of spans."""


@dataclass(frozen=True)
class SpanRows:
    """What is compared at some rows of the student; a span is measured as a whole, even if some rows are elsewhere."""

    teacher: OtherTokens
    classes: tuple[_Classes, _Classes]
    """The vocabularies of student and teacher."""
    labels: Tensor
    """(n,): the token that each row predicts."""
    pairs: Tensor
    """(n,), as in OtherTokens, on the CPU."""
    starts: Tensor
    """(n,), as in OtherTokens, on the CPU."""
    values: Tensor
    """(n,): the loss of a span at the row of its first token; 0 elsewhere."""
    spans: Tensor
    """(n,), `student_spans` of OtherTokens, on the CPU."""
    pulls: Tensor
    """(n,): its derivative with respect to the log-probability of the token that the row predicts; 0 outside of
    spans."""

    @classmethod
    def of(
        cls, student: HeadInputs, teacher: OtherTokens, labels_N: Tensor, terms: Sequence[TokenTerm], dtype: torch.dtype
    ) -> SpanRows:
        """Measure the likelihoods of the spans, if a term compares them; `dtype` is that of the losses."""
        values, pulls = (torch.zeros(len(labels_N), dtype=dtype, device=labels_N.device) for _ in range(2))
        if teacher.num_spans > 0 and any(term.divergence is not None and term.spans == "alm" for term in terms):
            log_p_S = _span_log_likelihoods(teacher.head, teacher.labels, teacher.spans, teacher.num_spans)
            log_q_S = _span_log_likelihoods(student, labels_N, teacher.student_spans, teacher.num_spans)
            loss_S, derivative_S = likelihood_loss(log_p_S, log_q_S)
            # The loss of a span is at the row of its first token alone.
            first_N = teacher.student_spans.where(teacher.starts >= 0, -1)
            for spans_N, target_N, of_span_S in (
                (teacher.student_spans, pulls, derivative_S),
                (first_N, values, loss_S),
            ):
                rows_n, spans_n = _known(spans_N, labels_N.device)
                target_N.index_copy_(0, rows_n, of_span_S[spans_n].to(dtype))
        # The size of a vocabulary is the width of the logits, without a weight the rows themselves.
        ours, theirs = (
            _Classes.of(ids, (head.rows if head.weight is None else head.weight.T).shape[1], labels_N.device)
            for ids, head in zip(teacher.shared, (student, teacher.head), strict=True)
        )
        spans_N = teacher.student_spans
        return cls(teacher, (ours, theirs), labels_N, teacher.pairs, teacher.starts, values, spans_N, pulls)

    def at(self, here: slice) -> SpanRows:
        """Return some of the rows."""
        parts = (self.labels, self.pairs, self.starts, self.values, self.spans, self.pulls)
        return SpanRows(self.teacher, self.classes, *(tensor[here] for tensor in parts))


def _known(numbers_n: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows whose number is not -1, and their numbers, both on the device."""
    rows_n = (numbers_n >= 0).nonzero()[:, 0]
    return _moved(rows_n, device), _moved(numbers_n[rows_n], device)


def likelihood_loss(log_p_S: Tensor, log_q_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss `alm` of spans from log-likelihoods in teacher and student, and its derivative by the latter."""
    # For a span of probability 1 the logarithm of 1 - p would be infinite.
    log_p, log_q = (log_likelihood.double().clamp(max=-1e-6) for log_likelihood in (log_p_S, log_q_S))
    # 1 - p^(1/τ), by expm1 because p^(1/τ) is close to 1.
    rest_p, rest_q = (-torch.expm1(log_likelihood / TAU) for log_likelihood in (log_p, log_q))
    loss_S = (log_p / TAU).exp() * (log_p - log_q) + TAU * rest_p * (rest_p / rest_q).log()
    # ∂/∂log q = (q' - p') / (1 - q') with p' = p^(1/τ), q' = q^(1/τ).
    return loss_S, (rest_p - rest_q) / rest_q


@torch.no_grad()
def _span_log_likelihoods(head: HeadInputs, labels_N: Tensor, spans_N: Tensor, num_spans: int) -> Tensor:
    """Return the log-likelihood of each span, the sum over its tokens, (S,) fp64."""
    log_likelihood_S = torch.zeros(num_spans, dtype=torch.float64, device=labels_N.device)
    for here_n in (spans_N >= 0).nonzero()[:, 0].split(_CHUNK):
        rows_n, spans_n = (_moved(each, labels_N.device) for each in (here_n, spans_N[here_n]))
        log_q_nV = exact_logits(head, rows_n).log_softmax(-1)
        log_q_n = log_q_nV.gather(1, labels_N[rows_n, None])[:, 0].clamp(min=LOG_FLOOR)
        log_likelihood_S.index_add_(0, spans_n, log_q_n.double())
    return log_likelihood_S


def _moved(indices: Tensor, device: torch.device) -> Tensor:
    """Return indices that were found on the CPU: on a GPU the host would wait for their number."""
    return indices.to(device, non_blocking=True)


def exact_logits(head: HeadInputs, here: slice | Tensor) -> Tensor:
    """Return the logits of some rows, whose dtype is that of the weight, (n, V), at least fp32."""
    rows_nK = head.rows[here]
    outputs_nV = rows_nK if head.weight is None else functional.linear(rows_nK, head.weight, head.bias)
    return head.scale.apply_(outputs_nV.to(torch.promote_types(outputs_nV.dtype, torch.float32)))


def span_losses(
    student_NV: Tensor, teacher: SpanRows, bound: BoundTokenTerms, *, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of each divergence over the rows of a chunk, and the derivative of Σ factor · sum by the logits.

    All terms have a divergence. The factors have the dtype of the results.
    """
    terms, factors = bound
    logits_NV = student_NV.to(factors.dtype)
    gradient = torch.zeros_like(logits_NV) if with_gradient else None
    sums = torch.zeros_like(factors)
    for place, term in enumerate(terms):
        for compare in (_compare_pairs, _compare_sorted if term.spans == "uld" else _compare_likelihoods):
            rows_n, value, derivative = compare(logits_NV, teacher, term)
            sums[place] += value
            if gradient is not None and len(rows_n) > 0:
                gradient.index_add_(0, rows_n, derivative * factors[place])
    return sums, gradient


def _compare_pairs(logits_NV: Tensor, teacher: SpanRows, term: TokenTerm) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the rows whose tokens both know; return the rows, the sum of the divergence, and its derivative by their
    logits.
    """
    assert term.divergence is not None
    rows_n, pairs_n, t = *_known(teacher.pairs, logits_NV.device), term.temperature
    p_logits_nV = exact_logits(teacher.teacher.head, pairs_n).to(logits_NV.dtype)
    log_q_nV = (logits_NV[rows_n] / t).log_softmax(-1)
    ours, theirs = teacher.classes
    # Both sides need the same classes, also where one of them has nothing in the rest.
    has_rest = ours.has_rest or theirs.has_rest
    log_p_nC = theirs.merge((p_logits_nV / t).log_softmax(-1), has_rest=has_rest).clamp(min=LOG_FLOOR)
    merged_nC = ours.merge(log_q_nV, has_rest=has_rest)
    log_q_nC = merged_nC.clamp(min=LOG_FLOOR)
    value = term.scale * term.divergence.value(log_p_nC, log_q_nC).sum()
    # A floored log-probability is a constant, without a derivative.
    of_class = term.divergence.derivative(log_p_nC, log_q_nC).masked_fill(merged_nC < LOG_FLOOR, 0.0)
    derivative_nV = ours.spread(of_class, log_q_nV, log_q_nC)
    # From log q to the logits: the derivative of the softmax.
    derivative_nV -= log_q_nV.exp() * derivative_nV.sum(-1, keepdim=True)
    return rows_n, value, derivative_nV * (term.scale / t)


@dataclass(frozen=True)
class _Classes:
    """The tokens of one vocabulary as K shared ones and the rest."""

    shared: Tensor
    """(K,)"""
    rest: Tensor
    """The ids of all other tokens."""

    @staticmethod
    @lru_cache(maxsize=4)  # the shared tokens of a run are the same tensors in each batch
    def of(shared_K: Tensor, words: int, device: torch.device) -> _Classes:
        is_rest = torch.ones(words, dtype=torch.bool)
        is_rest[shared_K] = False
        return _Classes(_moved(shared_K, device), _moved(is_rest.nonzero()[:, 0], device))

    @property
    def has_rest(self) -> bool:
        return len(self.rest) > 0

    def merge(self, log_q_nV: Tensor, *, has_rest: bool) -> Tensor:
        """Return the log-probabilities of the classes, (n, K), or (n, K + 1) with the rest as the last class."""
        shared_nK = log_q_nV.index_select(1, self.shared)
        if not has_rest:
            return shared_nK
        # If this vocabulary has no other tokens, the mass of the rest is 0: logsumexp of an empty row is -inf.
        return torch.cat([shared_nK, log_q_nV.index_select(1, self.rest).logsumexp(-1, keepdim=True)], dim=1)

    def spread(self, of_class_nC: Tensor, log_q_nV: Tensor, log_q_nC: Tensor) -> Tensor:
        """Return the derivative by log q of each token, (n, V); the rest's is shared out by probability."""
        derivative_nV = torch.zeros_like(log_q_nV).index_copy_(1, self.shared, of_class_nC[:, : len(self.shared)])
        if self.has_rest:
            share = (log_q_nV.index_select(1, self.rest) - log_q_nC[:, -1:]).exp()
            derivative_nV.index_copy_(1, self.rest, share * of_class_nC[:, -1:])
        return derivative_nV


def _compare_likelihoods(logits_NV: Tensor, teacher: SpanRows, _term: TokenTerm) -> tuple[Tensor, Tensor, Tensor]:
    """Compare rows within spans by the likelihood of the spans; results as in `_compare_pairs`."""
    rows_n, _ = _known(teacher.spans, logits_NV.device)
    # ∂log q_label/∂z = one-hot label - q
    derivative_nV = logits_NV[rows_n].softmax(-1).mul_(-teacher.pulls[rows_n, None])
    derivative_nV[torch.arange(len(rows_n), device=rows_n.device), teacher.labels[rows_n]] += teacher.pulls[rows_n]
    return rows_n, teacher.values.sum(), derivative_nV


def _compare_sorted(logits_NV: Tensor, teacher: SpanRows, _term: TokenTerm) -> tuple[Tensor, Tensor, Tensor]:
    """Compare rows that predict a span's first token by their sorted distributions; results as in `_compare_pairs`."""
    rows_n, starts_n = _known(teacher.starts, logits_NV.device)
    q_nV = logits_NV[rows_n].softmax(-1)
    p_nV = exact_logits(teacher.teacher.head, starts_n).to(logits_NV.dtype).softmax(-1)
    sorted_q_nV, order_nV = q_nV.sort(-1, descending=True)
    sorted_p_nV = p_nV.sort(-1, descending=True).values
    missing = q_nV.shape[1] - p_nV.shape[1]
    gap_nV = sorted_q_nV - functional.pad(sorted_p_nV, (0, missing))[:, : q_nV.shape[1]]
    # Tokens of the teacher beyond the student's number of tokens meet zeros.
    beyond = sorted_p_nV[:, q_nV.shape[1] :].sum()
    # Back from the sorted order to that of the vocabulary.
    sign_nV = torch.zeros_like(q_nV).scatter_(1, order_nV, gap_nV.sign())
    return rows_n, gap_nV.abs().sum() + beyond, q_nV * (sign_nV - (q_nV * sign_nV).sum(-1, keepdim=True))
