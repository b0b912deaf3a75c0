"""The token terms between the two matrix products of the LM head, as a Triton kernel."""

# Triton reads the annotations of a kernel as part of its code.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmdistill.batch import LogitScale
from llmdistill.losses import divergence
from llmdistill.losses.terms import BoundTokenTerms

LOG_FLOOR = tl.constexpr(divergence.LOG_FLOOR)
LARGEST_BLOCK = 4096
"""Largest number of a row's tokens that a program reads at a time."""


def kernel_losses(
    student_NV: Tensor,
    teacher_NV: Tensor | None,
    labels_N: Tensor,
    bound: BoundTokenTerms,
    *,
    scales: tuple[LogitScale, LogitScale] = (LogitScale(), LogitScale()),
    with_gradient: bool,
) -> Tensor:
    """`head_chunk.chunk_losses` for divergences that have the name of a kernel.

    One program handles one row. It reads the row once for the two log-softmaxes and once more for values and gradient.
    Divergences whose derivatives do not sum to a known number need a third pass. The kernel allocates no memory of the
    size of the rows and uses no atomics, and the host never waits. Outputs are fp32, bf16 or fp16, with contiguous
    rows; the teacher's stay as they are, the student's too if `with_gradient` is False. The sums are fp32. Factors and
    caps of the logits are applied to a block when it is read.
    """
    terms, factors = bound
    rows, words = student_NV.shape
    if teacher_NV is None:
        assert all(term.divergence is None for term in terms), "a divergence needs the teacher's logits"
        # The kernel reads a teacher in any case; without a divergence its values have no effect.
        teacher_NV = student_NV
    assert teacher_NV.shape == student_NV.shape, f"{tuple(teacher_NV.shape)}, not {tuple(student_NV.shape)}"
    assert student_NV.stride(1) == teacher_NV.stride(1) == 1, "a row's words must be contiguous"
    values_NK = torch.empty(rows, len(terms), dtype=torch.float32, device=student_NV.device)
    if rows == 0:
        return values_NK.sum(0)
    kinds = tuple("label" if term.divergence is None else term.divergence.kernel for term in terms)
    with torch.cuda.device_of(student_NV):
        _rows_kernel[(rows,)](
            student_NV,
            teacher_NV,
            labels_N.contiguous(),
            factors.contiguous(),
            values_NK,
            student_NV.stride(0),
            teacher_NV.stride(0),
            words,
            # Compile-time constants: each combination of terms is a kernel of its own.
            KINDS=kinds,
            # The cross-entropy of the labels has neither temperature nor scale.
            TEMPERATURES=tuple(1.0 if term.divergence is None else float(term.temperature) for term in terms),
            SCALES=tuple(1.0 if term.divergence is None else float(term.scale) for term in terms),
            SHARES=tuple(term.smoothing if term.divergence is None else float(term.divergence.share) for term in terms),
            # A cap of 0 is none.
            STUDENT_SCALE=(float(scales[0].factor), float(scales[0].cap or 0)),
            TEACHER_SCALE=(float(scales[1].factor), float(scales[1].cap or 0)),
            SLOTS=triton.next_power_of_2(len(terms)),
            # The derivatives of these kinds sum to -1, so the pass that computes the values can write the gradient.
            KNOWN_SLOPES=all(kind in ("label", "soft_cross_entropy", "forward_kl") for kind in kinds)
            and all(term.smoothing == 0 for term in terms),
            WITH_GRADIENT=with_gradient,
            BLOCK=min(LARGEST_BLOCK, triton.next_power_of_2(words)),
            num_warps=8,  # 8 x 32 threads, with 16 tokens of a full block for each
        )
    return values_NK.sum(0)


@triton.jit
def _rows_kernel(
    student_ptr,
    teacher_ptr,
    labels_ptr,
    factors_ptr,
    values_ptr,
    student_stride,
    teacher_stride,
    words,
    KINDS: tl.constexpr,
    TEMPERATURES: tl.constexpr,
    SCALES: tl.constexpr,
    SHARES: tl.constexpr,
    STUDENT_SCALE: tl.constexpr,
    TEACHER_SCALE: tl.constexpr,
    SLOTS: tl.constexpr,
    KNOWN_SLOPES: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # row index times vocabulary size may exceed 2³¹
    student_ptr += row * student_stride
    teacher_ptr += row * teacher_stride
    label = tl.load(labels_ptr + row)
    TERMS: tl.constexpr = len(KINDS)
    slot = tl.arange(0, SLOTS)  # small vectors hold the values of all terms, one slot per term

    student_max = tl.full((), -float("inf"), tl.float32)
    teacher_max = tl.full((), -float("inf"), tl.float32)
    student_sums = tl.zeros((SLOTS,), tl.float32)
    teacher_sums = tl.zeros((SLOTS,), tl.float32)
    open_sums = tl.zeros((SLOTS,), tl.float32)  # teacher's sums over tokens with student logits above LOG_FLOOR
    for start in range(0, words, BLOCK):
        student = _logits(student_ptr, start, words, BLOCK, STUDENT_SCALE)
        teacher = _logits(teacher_ptr, start, words, BLOCK, TEACHER_SCALE)
        student_new = tl.maximum(student_max, tl.max(student, 0))
        teacher_new = tl.maximum(teacher_max, tl.max(teacher, 0))
        for k in tl.static_range(TERMS):
            here = slot == k
            # Online softmax: a new maximum rescales the sums so far.
            student_share = _exp_difference(student, student_new, TEMPERATURES[k])
            scaled = student_sums * _exp_difference(student_max, student_new, TEMPERATURES[k])
            student_sums = tl.where(here, scaled + tl.sum(student_share, 0), student_sums)
            if KINDS[k] != "label":
                teacher_share = _exp_difference(teacher, teacher_new, TEMPERATURES[k])
                decay = _exp_difference(teacher_max, teacher_new, TEMPERATURES[k])
                teacher_sums = tl.where(here, teacher_sums * decay + tl.sum(teacher_share, 0), teacher_sums)
                open_share = tl.where(student > LOG_FLOOR * TEMPERATURES[k], teacher_share, 0.0)
                open_sums = tl.where(here, open_sums * decay + tl.sum(open_share, 0), open_sums)
        student_max = student_new
        teacher_max = teacher_new

    student_log_sums = tl.log(student_sums)
    teacher_log_sums = tl.log(teacher_sums)
    values = tl.zeros((SLOTS,), tl.float32)
    derivative_sums = tl.zeros((SLOTS,), tl.float32)
    if KNOWN_SLOPES:
        for k in tl.static_range(TERMS):
            # -1 of a one-hot label, or -Σ p over the tokens whose log q is above the floor.
            derivative_sum = -1.0 if KINDS[k] == "label" else -_pick(open_sums / teacher_sums, k, SLOTS)
            derivative_sums = tl.where(slot == k, derivative_sum, derivative_sums)
    if not (KNOWN_SLOPES and WITH_GRADIENT):
        for start in range(0, words, BLOCK):
            # The log-sums are relative to the maximum, as the exponentials were.
            student = _logits(student_ptr, start, words, BLOCK, STUDENT_SCALE) - student_max
            teacher = _logits(teacher_ptr, start, words, BLOCK, TEACHER_SCALE) - teacher_max
            word = start + tl.arange(0, BLOCK)
            for k in tl.static_range(TERMS):
                log_q = student / TEMPERATURES[k] - _pick(student_log_sums, k, SLOTS)
                log_p = teacher / TEMPERATURES[k] - _pick(teacher_log_sums, k, SLOTS)
                value, derivative = _value_and_derivative(
                    log_p, log_q, word, label, words, tl.constexpr(SHARES[k]), tl.constexpr(KINDS[k])
                )
                values = tl.where(slot == k, values + tl.sum(value, 0), values)
                if not KNOWN_SLOPES:
                    derivative_sums = tl.where(slot == k, derivative_sums + tl.sum(derivative, 0), derivative_sums)
    if WITH_GRADIENT:
        for start in range(0, words, BLOCK):
            logits = _logits(student_ptr, start, words, BLOCK, STUDENT_SCALE)
            student = logits - student_max
            teacher = _logits(teacher_ptr, start, words, BLOCK, TEACHER_SCALE) - teacher_max
            word = start + tl.arange(0, BLOCK)
            gradient = tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(TERMS):
                log_q = student / TEMPERATURES[k] - _pick(student_log_sums, k, SLOTS)
                log_p = teacher / TEMPERATURES[k] - _pick(teacher_log_sums, k, SLOTS)
                value, derivative = _value_and_derivative(
                    log_p, log_q, word, label, words, tl.constexpr(SHARES[k]), tl.constexpr(KINDS[k])
                )
                if KNOWN_SLOPES:
                    values = tl.where(slot == k, values + tl.sum(value, 0), values)
                factor = tl.load(factors_ptr + k) * (SCALES[k] / TEMPERATURES[k])
                gradient += factor * (derivative - tl.exp(log_q) * _pick(derivative_sums, k, SLOTS))
            if STUDENT_SCALE[1] > 0:
                tanh = logits / STUDENT_SCALE[1]
                gradient *= 1 - tanh * tanh
            gradient *= STUDENT_SCALE[0]
            # This is the last pass over the row, so the gradient may overwrite the outputs.
            tl.store(student_ptr + word, gradient, mask=word < words)
    for k in tl.static_range(TERMS):
        tl.store(values_ptr + row * TERMS + k, _pick(values, k, SLOTS) * SCALES[k])


@triton.jit
def _logits(row_ptr, start, words, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """A block of a row's logits, in fp32; beyond the end of the row -inf, a token with probability 0."""
    at = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + at, mask=at < words, other=-float("inf")).to(tl.float32) * SCALE[0]
    if SCALE[1] > 0:
        # tanh(x) = 2 σ(2x) - 1
        logits = SCALE[1] * (2 * tl.sigmoid(logits * (2 / SCALE[1])) - 1)
        logits = tl.where(at < words, logits, -float("inf"))
    return logits


@triton.jit
def _exp_difference(logits, largest, temperature):
    """exp((logits - largest) / t); 0 as long as all logits read so far are -inf."""
    return tl.exp((logits - tl.where(largest == -float("inf"), 0.0, largest)) / temperature)


@triton.jit
def _pick(values, k: tl.constexpr, SLOTS: tl.constexpr):
    # Triton has no index into a vector of registers.
    return tl.sum(tl.where(tl.arange(0, SLOTS) == k, values, 0.0), 0)


@triton.jit
def _value_and_derivative(log_p, log_q, word, label, words, share: tl.constexpr, KIND: tl.constexpr):
    """Each token's part of the loss, and the derivative of the loss with respect to log q_j, all log q independent."""
    if KIND == "label":
        derivative = tl.where(word == label, -1.0 + share, 0.0)
        value = tl.where(word == label, (-1.0 + share) * log_q, 0.0)
        if share > 0:  # label smoothing; beyond the end of the row there is no word to spread over
            value -= tl.where(word < words, share / words * tl.maximum(log_q, LOG_FLOOR), 0.0)
            derivative -= tl.where((word < words) & (log_q >= LOG_FLOOR), share / words, 0.0)
    else:
        value, derivative = _divergence(tl.maximum(log_p, LOG_FLOOR), tl.maximum(log_q, LOG_FLOOR), share, KIND)
        derivative = tl.where(log_q >= LOG_FLOOR, derivative, 0.0)
    return value, derivative


@triton.jit
def _divergence(log_p, log_q, share: tl.constexpr, KIND: tl.constexpr):
    """Value and derivative of a divergence for each token, with the formulas of `losses.divergence`."""
    p = tl.exp(log_p)
    q = tl.exp(log_q)
    if KIND == "soft_cross_entropy":
        value = -p * log_q
        derivative = -p
    elif KIND == "forward_kl":
        value = p * (log_p - log_q)
        derivative = -p
    elif KIND == "reverse_kl":
        value = q * (log_q - log_p)
        derivative = value + q
    elif KIND == "jsd":
        log_m = _log_mix(log_p, log_q, share)  # GKD eq. 1
        value = share * p * (log_p - log_m) + (1 - share) * q * (log_q - log_m)
        derivative = (1 - share) * q * (log_q - log_m)  # the other terms cancel because M depends on S
    elif KIND == "skew_forward_kl":
        log_m = _log_mix(log_p, log_q, share)
        value = p * (log_p - log_m)
        derivative = -(1 - share) * p * tl.exp(log_q - log_m)  # -p (1-α) q / m
    elif KIND == "skew_reverse_kl":
        log_m = _log_mix(log_q, log_p, share)
        value = q * (log_q - log_m)
        derivative = value + q * (1 - share * tl.exp(log_q - log_m))
    else:
        tl.static_assert(KIND == "total_variation", "an unknown divergence")
        value = 0.5 * tl.abs(p - q)
        derivative = tl.where(p == q, 0.0, tl.where(q > p, 0.5, -0.5)) * q
    return value, derivative


@triton.jit
def _log_mix(log_a, log_b, share: tl.constexpr):
    """log(share · a + (1-share) · b)."""
    log_a += tl.log(tl.full((), share, tl.float32))
    log_b += tl.log(tl.full((), 1 - share, tl.float32))
    return tl.maximum(log_a, log_b) + tl.log(1 + tl.exp(-tl.abs(log_a - log_b)))
