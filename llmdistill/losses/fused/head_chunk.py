"""Values of the token terms and their derivatives with respect to the logits, for one chunk of `losses.head`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from llmdistill.batch import LogitScale, OtherTokens, TeacherRows, TopK
from llmdistill.losses.divergence import FORWARD_KL, LOG_FLOOR, SOFT_CROSS_ENTROPY, Divergence
from llmdistill.losses.fused.triton import available
from llmdistill.losses.other_tokens import SpanRows, span_losses
from llmdistill.losses.terms import BoundTokenTerms, TokenTerm
from llmdistill.losses.top_k import merge, soften, spread

_BLOCK_BYTES = 1 << 19
"""Bytes of one buffer for each thread. With this size the four buffers of a block of rows stay in a core's L2 cache."""

_DOUBTFUL = 1e3
"""If the divergence of a row is larger than this bound, or NaN, LOG_FLOOR may affect the row."""


ChunkLosses = Callable[[Tensor, Tensor | TopK | SpanRows | None, Tensor], Tensor]
"""Returns the sum of each term over the rows of a chunk, (C,), in the dtype of the factors.

Takes the outputs (n, V) of the LM heads of student and teacher, and the labels (n,). The teacher's are None if no term
uses a divergence, and may be its most likely tokens or rows in other tokens instead. With gradient, the derivative of
Σ factor · sum with respect to the student's outputs overwrites these outputs; the outputs of both models are
overwritten in any case."""


def choose_chunk_losses(
    student_NV: Tensor,
    teacher: TeacherRows | None,
    bound: BoundTokenTerms,
    *,
    scales: tuple[LogitScale, LogitScale] = (LogitScale(), LogitScale()),
    with_gradient: bool,
) -> ChunkLosses:
    """Return what computes the terms of the chunks, as fast as the device can.

    Only the device and the dtype of `student_NV` matter here. The logits of student and teacher follow from the outputs
    by `scales`.
    """
    terms, factors = bound
    if student_NV.is_meta:  # the kernels of a GPU overwrite the logits and need no further memory
        return lambda *_chunk: torch.zeros_like(factors)
    if isinstance(teacher, OtherTokens):
        return partial(_span_losses, bound=bound, scale=scales[0], with_gradient=with_gradient)
    known = all(term.divergence is None or term.divergence.kernel is not None for term in terms)
    fits = known and available(student_NV.device) and student_NV.element_size() <= 4  # kernels compute in fp32
    if fits and not isinstance(teacher, TopK):  # the kernels know no classes of tokens
        from llmdistill.losses.fused import triton_head  # importing it requires Triton

        return partial(triton_head.kernel_losses, bound=bound, scales=scales, with_gradient=with_gradient)
    closed_form = partial(_closed_form_losses, bound=bound, scales=scales, with_gradient=with_gradient)
    # _FewExponentials reads its values to check them; on CUDA the host would have to wait for them.
    may_check = student_NV.device.type == "cpu" and not isinstance(teacher, TopK)
    few_exponentials = _FewExponentials.of(bound) if may_check else None
    if few_exponentials is None:
        return closed_form
    return partial(few_exponentials.compute, bound=bound, scales=scales, with_gradient=with_gradient)


@dataclass
class _Block:
    """Some rows of a chunk, in the dtype of the losses."""

    student: Tensor
    """(n, V), the student's logits, which may be overwritten."""
    teacher: Tensor | TopK | None
    """(n, V), the teacher's logits, which may be overwritten."""
    labels: Tensor
    gradient: Tensor | None = None
    """(n, V), the derivative of Σ factor · sum with respect to the student's logits, set by the losses; it may lie in
    their memory. None if it is not requested."""


def _split_into_blocks(
    student_NV: Tensor,
    teacher_NV: Tensor | TopK | None,
    labels_N: Tensor,
    *,
    scales: tuple[LogitScale, LogitScale],
    dtype: torch.dtype,
    with_gradient: bool,
) -> Iterator[_Block]:
    """Yield the rows of a chunk in blocks that fit into a CPU's cache; each block's gradient overwrites its outputs."""
    size = max(1, len(labels_N))
    if student_NV.device.type == "cpu":
        size = torch.get_num_threads() * max(1, _BLOCK_BYTES // max(1, student_NV.shape[1] * dtype.itemsize))
    for start in range(0, len(labels_N), size):
        here = slice(start, start + size)
        student = scales[0].apply_(student_NV[here].to(dtype))
        # The losses overwrite the logits, from which the slope follows.
        slope = scales[0].slope(student) if with_gradient else 1.0
        if isinstance(teacher_NV, Tensor):
            teacher: Tensor | TopK | None = scales[1].apply_(teacher_NV[here].to(dtype))
        else:
            teacher = None if teacher_NV is None else teacher_NV.at(here)
        block = _Block(student, teacher, labels_N[here])
        yield block
        if block.gradient is None:
            continue
        if not scales[0].is_plain:
            block.gradient.mul_(slope)
        # `.to` gives the chunk itself, or a copy if the dtypes differ, whose gradient must be written back.
        is_in_place = block.gradient is student and student.dtype == student_NV.dtype
        if not is_in_place:
            student_NV[here] = block.gradient


def _span_losses(
    student_NV: Tensor,
    teacher: SpanRows,
    labels_N: Tensor,
    *,
    bound: BoundTokenTerms,
    scale: LogitScale,
    with_gradient: bool,
) -> Tensor:
    """`ChunkLosses` for a teacher with another tokenizer: the divergences, and then the terms on labels."""
    if not scale.is_plain:
        logits_NV = scale.apply_(student_NV.to(bound.factors.dtype, copy=True))
        slope = scale.slope(logits_NV)
        sums = _span_losses(logits_NV, teacher, labels_N, bound=bound, scale=LogitScale(), with_gradient=with_gradient)
        if with_gradient:
            student_NV.copy_(logits_NV.mul_(slope))
        return sums
    sums = torch.zeros_like(bound.factors)
    soft = [place for place, term in enumerate(bound.terms) if term.divergence is not None]
    hard = [place for place, term in enumerate(bound.terms) if term.divergence is None]
    # The spans come first, because the terms on labels overwrite the logits.
    sums[soft], gradients = span_losses(student_NV, teacher, bound.select(soft), with_gradient=with_gradient)
    if hard:
        label_losses = choose_chunk_losses(student_NV, None, bound.select(hard), with_gradient=with_gradient)
        sums[hard] = label_losses(student_NV, None, labels_N)
    if gradients is not None:
        # With terms on labels the logits hold their gradient by now.
        student_NV.copy_(student_NV + gradients if hard else gradients)
    return sums


def _closed_form_losses(
    student_NV: Tensor,
    teacher_NV: Tensor | TopK | None,
    labels_N: Tensor,
    *,
    bound: BoundTokenTerms,
    scales: tuple[LogitScale, LogitScale],
    with_gradient: bool,
) -> Tensor:
    """`ChunkLosses` of any terms, by the closed-form derivatives: dz = (derivative - q Σ derivative) / t."""
    terms, factors = bound
    temperatures = [1.0 if term.divergence is None else term.temperature for term in terms]
    sums = torch.zeros_like(factors)
    for block in _split_into_blocks(
        student_NV, teacher_NV, labels_N, scales=scales, dtype=factors.dtype, with_gradient=with_gradient
    ):
        student, teacher, labels = block.student, block.teacher, block.labels
        gradient = torch.zeros_like(student) if with_gradient else None
        block_sums = torch.zeros_like(factors)
        for temperature in dict.fromkeys(temperatures):  # terms with the same temperature share the softmax
            log_q = (student / temperature).log_softmax(-1)
            floored_log_q = log_q.clamp(min=LOG_FLOOR)
            here = [i for i in range(len(terms)) if temperatures[i] == temperature]
            kinds = {divergence.of_labels for i in here if (divergence := terms[i].divergence) is not None}
            compared_by_kind = {
                of_labels: _compare(teacher, labels if of_labels else None, log_q, floored_log_q, temperature)
                for of_labels in kinds
            }
            derivatives = torch.zeros_like(student) if with_gradient else None
            for i in here:
                term = terms[i]
                if term.divergence is None:
                    # The label also gets its part of what is spread over the vocabulary (Szegedy et al. 2016, §7).
                    label_share = 1 - term.smoothing
                    block_sums[i] = -label_share * log_q.gather(1, labels[:, None]).sum()
                    if term.smoothing > 0:
                        block_sums[i] -= term.smoothing * floored_log_q.mean(-1).sum()
                    if derivatives is not None:
                        derivatives.scatter_add_(1, labels[:, None], (-label_share * factors[i]).expand(len(labels), 1))
                        if term.smoothing > 0:
                            derivatives.sub_((log_q >= LOG_FLOOR) * (factors[i] * (term.smoothing / log_q.shape[1])))
                    continue
                compared = compared_by_kind[term.divergence.of_labels]
                block_sums[i] = term.scale * term.divergence.value(compared.log_p, compared.log_q).sum()
                if derivatives is not None:
                    derivative = term.divergence.derivative(compared.log_p, compared.log_q)
                    if compared.tokens is not None:
                        derivative = spread(derivative, log_q, compared.log_q, compared.tokens)
                    derivative.masked_fill_(log_q < LOG_FLOOR, 0.0)  # a floored log-probability is a constant
                    derivatives.add_(derivative.mul_(factors[i] * (term.scale / temperature)))
            if gradient is not None and derivatives is not None:
                # The softmax: dz = derivative - q Σ derivative, with 1 / t in the derivatives already.
                gradient.add_(derivatives).sub_(log_q.exp_().mul_(derivatives.sum(-1, keepdim=True)))
        block.gradient = gradient
        sums += block_sums
    return sums


class _Compared(NamedTuple):
    """The log-probabilities that a divergence compares at one temperature: of tokens, or of their classes."""

    log_p: Tensor
    log_q: Tensor
    tokens: Tensor | None
    """(n, k), the tokens that are classes of their own; None if every token is."""


def _compare(
    teacher: Tensor | TopK | None, labels: Tensor | None, log_q: Tensor, floored_log_q: Tensor, temperature: float
) -> _Compared:
    """Return what a divergence compares: all tokens; with labels two classes, each label and all other tokens."""
    assert teacher is not None, "a divergence needs a teacher"
    if isinstance(teacher, TopK):
        assert labels is None, "a label may be none of the most likely tokens"
        log_p = soften(teacher, temperature).to(log_q.dtype).clamp_(min=LOG_FLOOR)
        return _Compared(log_p, merge(log_q, teacher.tokens).clamp_(min=LOG_FLOOR), teacher.tokens)
    log_p = (teacher / temperature).log_softmax(-1)
    if labels is None:
        return _Compared(log_p.clamp_(min=LOG_FLOOR), floored_log_q, None)
    tokens = labels[:, None]
    log_p, log_q = (merge(log_probs, tokens).clamp_(min=LOG_FLOOR) for log_probs in (log_p, log_q))
    return _Compared(log_p, log_q, tokens)


@dataclass(frozen=True)
class _FewExponentials:
    """KL(T‖S) and soft cross-entropy at one temperature, also with the labels' plain cross-entropy, in less time.

    The derivative is a weighted sum of q, p and the one-hot label; the values need one exp of each distribution.
    """

    # Measured on a CPU, this saves 6 to 7 % of the time of head and loss, and 0 to 3 % of a step of kd. Without it the
    # last bits of a run on a CPU would change.

    terms: Sequence[TokenTerm]
    temperature: float
    soft_factor: float
    """Factor of q - p in the derivative with respect to the logits."""
    label_factor: float
    """Factor of q - label in the derivative with respect to the logits, with q at temperature 1."""

    @classmethod
    def of(cls, bound: BoundTokenTerms) -> _FewExponentials | None:
        """Return the computation for these terms; None if it does not support a term, or if the temperatures differ."""
        terms, factors = bound
        soft = [term for term in terms if term.divergence is not None]
        temperatures = {term.temperature for term in soft} or {1.0}
        if len(temperatures) > 1 or any(term.divergence not in (FORWARD_KL, SOFT_CROSS_ENTROPY) for term in soft):
            return None
        if any(term.smoothing > 0 for term in terms):
            return None
        pairs = list(zip(terms, factors.tolist(), strict=True))
        return cls(
            terms,
            temperatures.pop(),
            sum(factor * term.scale / term.temperature for term, factor in pairs if term.divergence is not None),
            sum(factor for term, factor in pairs if term.divergence is None),
        )

    def compute(
        self,
        student_NV: Tensor,
        teacher_NV: Tensor | None,
        labels_N: Tensor,
        *,
        bound: BoundTokenTerms,
        scales: tuple[LogitScale, LogitScale],
        with_gradient: bool,
    ) -> Tensor:
        """Implements `ChunkLosses`."""
        sums = torch.zeros_like(bound.factors)
        memory: list[Tensor] = []
        for block in _split_into_blocks(
            student_NV, teacher_NV, labels_N, scales=scales, dtype=sums.dtype, with_gradient=with_gradient
        ):
            # The first block is the largest.
            memory = memory or [torch.empty_like(block.student) for _ in range(2)]
            for_p, for_q = (tensor[: len(block.labels)] for tensor in memory)
            block_sums = self._compute_block(block, for_p, for_q, with_gradient=with_gradient)
            if block_sums is None:
                plain = LogitScale(), LogitScale()
                block_sums = _closed_form_losses(
                    block.student, block.teacher, block.labels, bound=bound, scales=plain, with_gradient=with_gradient
                )
                block.gradient = block.student if with_gradient else None
            sums += block_sums
        return sums

    def _compute_block(self, block: _Block, for_p: Tensor, for_q: Tensor, *, with_gradient: bool) -> Tensor | None:
        """Return the sums of a block, or None if LOG_FLOOR may affect it; the gradient is in the student's memory.

        If it returns None, the logits of both models differ from the input only by a constant in each row, which does
        not change their softmax. `for_p` and `for_q` are memory for the exponentials of teacher and student, (n, V);
        more of it would leave a core's cache.
        """
        student, teacher, labels = block.student, block.teacher, block.labels
        kinds = {term.divergence for term in self.terms}
        values: dict[Divergence | None, Tensor] = {}
        student.sub_(student.amax(-1, keepdim=True))  # so that no exponential overflows
        if kinds != {None}:
            assert isinstance(teacher, Tensor), "a divergence needs a teacher"
            teacher.sub_(teacher.amax(-1, keepdim=True))
            p, p_total = _exponentiate(teacher, self.temperature, out=for_p)
            if FORWARD_KL in kinds:
                mean_gap = torch.sub(teacher, student, out=for_q).mul_(p).sum(-1, keepdim=True) / p_total
                # Σ p (z_T - z_S) / t - log Z_T; log Z_S of the student is added to all values below.
                values[FORWARD_KL] = mean_gap / self.temperature - p_total.log()
            if SOFT_CROSS_ENTROPY in kinds:
                mean = torch.mul(p, student, out=for_q).sum(-1, keepdim=True) / p_total
                values[SOFT_CROSS_ENTROPY] = -mean / self.temperature
            # Until here this memory was room for products.
            q, q_total = _exponentiate(student, self.temperature, out=for_q)
            for kind in values:
                values[kind] += q_total.log()
                if not (values[kind] < _DOUBTFUL).all():  # also for NaN
                    return None
        # At temperature 1 the softmax of the labels is that of the divergence.
        shared = kinds != {None} and self.temperature == 1
        if None in kinds:
            # The teacher's logits are not needed any more, so their memory holds the student's second exponentials.
            free = teacher if isinstance(teacher, Tensor) and kinds != {None} else for_q
            label_q, label_total = (q, q_total) if shared else _exponentiate(student, 1.0, out=free)
            values[None] = label_total.log() - student.gather(1, labels[:, None])
        scales = [1.0 if term.divergence is None else term.scale for term in self.terms]
        sums = torch.stack([values[term.divergence].sum() * x for term, x in zip(self.terms, scales, strict=True)])
        if not with_gradient:
            return sums
        if kinds == {None}:
            # No value needs the logits any more, so their memory takes the gradient.
            gradient = torch.mul(label_q, self.label_factor / label_total, out=student)
        else:
            of_q = self.soft_factor + (self.label_factor if shared else 0.0)
            gradient = torch.mul(q, of_q / q_total, out=student).sub_(p.mul_(self.soft_factor / p_total))
            if None in kinds and not shared:
                gradient.add_(label_q.mul_(self.label_factor / label_total))
        if None in kinds:
            gradient.scatter_add_(1, labels[:, None], torch.full_like(label_total, -self.label_factor))
        block.gradient = gradient
        return sums


def _exponentiate(logits: Tensor, temperature: float, *, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(logits / t) and its sums, (n, 1)."""
    # A multiplication by 1 would be one more pass over the block.
    exps = torch.exp(logits, out=out) if temperature == 1 else torch.mul(logits, 1 / temperature, out=out).exp_()
    return exps, exps.sum(-1, keepdim=True)
