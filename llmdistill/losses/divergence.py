"""Divergences between the output distributions of teacher T and student S, in fp32 log space.

A new divergence is a function, an entry in DIVERGENCES, and a naive formula in its test. The values that
`kd.divergence` takes, the methods, the fused LM head, comparisons and the table in the docs follow from the entry. Two
texts do not: the help of `kd.divergence` and the names that `llmdistill.losses` exports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from llmdistill.batch import IGNORE_INDEX, LossSum, predicted_labels
from llmdistill.errors import UserError
from llmdistill.plugins import load_plugins

if TYPE_CHECKING:  # settings are checked against DIVERGENCES, and a command line is parsed without torch
    from torch import Tensor

LOG_FLOOR = -1e5
"""Smallest log-probability: its exp is 0 in fp32, but it is finite. It replaces -inf for a token whose logit is -inf,
because 0 x inf would make the loss and its gradient NaN."""


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(T‖S) = Σ p (log p - log q) of each row; the student covers all tokens likely under T (Hinton et al. 2015).

    Args:
        log_p: the teacher's log-probabilities, (N, V), as in all functions below.
        log_q: the student's log-probabilities, (N, V).

    Returns:
        (N,), at least 0 up to rounding.
    """
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(S‖T) = Σ q (log q - log p); the student avoids tokens unlikely under T (MiniLLM's objective, per token)."""
    return forward_kl(log_q, log_p)


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """β KL(T‖M) + (1-β) KL(S‖M) with M = β T + (1-β) S (GKD eq. 1); bounded, and close to a KL near β = 0 and 1."""
    log_m = _log_mix(log_p, log_q, beta)
    return beta * forward_kl(log_p, log_m) + (1 - beta) * forward_kl(log_q, log_m)


def skew_forward_kl(log_p: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """KL(T‖αT + (1-α)S); the gradient is bounded even where the student's probability is near 0 (DistiLLM)."""
    return forward_kl(log_p, _log_mix(log_p, log_q, alpha))


def skew_reverse_kl(log_p: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """KL(S‖(1-α)T + αS), the reverse of `skew_forward_kl` (DistiLLM)."""
    return forward_kl(log_q, _log_mix(log_q, log_p, alpha))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """½ Σ |p - q|, between 0 and 1."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


class Divergence(NamedTuple):
    """A divergence and its derivative in closed form, for losses that compute gradients without autograd."""

    value: Callable[[Tensor, Tensor], Tensor]
    """Maps (log_p, log_q), both (N, V), to the divergence of each row, (N,)."""
    derivative: Callable[[Tensor, Tensor], Tensor]
    """Maps (log_p, log_q) to (N, V): the derivative of the value with respect to log q_j, with all log q as independent
    variables. For logits z and q = softmax(z / t), the gradient is dz_j = (derivative_j - q_j Σ derivative) / t."""
    kernel: str | None = None
    """Name of the divergence in the GPU kernels; None if the kernels do not support it."""
    share: float = 0.5
    """β or α of the divergence in the GPU kernels."""
    of_labels: bool = False
    """Whether it compares two classes, (N, 2) in place of (N, V): the label of the row, and all other tokens."""


def divergence_by_autograd(value: Callable[[Tensor, Tensor], Tensor]) -> Divergence:
    """Make a divergence of your own, with autograd's derivative; one in closed form needs less memory.

        def hellinger(log_p, log_q):
            return 1 - (0.5 * (log_p + log_q)).exp().sum(-1)

        divergence = divergence_by_autograd(hellinger)

    Args:
        value: maps the log-probabilities of teacher and student, both (N, V), to the divergence of each row, (N,).

    Raises:
        UserError: when the divergence is computed, if the result is not (N,).
    """

    def checked(log_p: Tensor, log_q: Tensor) -> Tensor:
        rows_N = value(log_p, log_q)
        if rows_N.shape != log_q.shape[:1]:
            name = getattr(value, "__name__", "the divergence")
            raise UserError(
                f"{name} gives {tuple(rows_N.shape)} for log-probabilities of {tuple(log_q.shape)}: return one number "
                "for each row, by .sum(-1)"
            )
        return rows_N

    def derivative(log_p: Tensor, log_q: Tensor) -> Tensor:
        import torch

        # The fused head calls this within no_grad.
        with torch.enable_grad():
            variable = log_q.detach().requires_grad_()
            return torch.autograd.grad(checked(log_p, variable).sum(), variable)[0]

    return Divergence(checked, derivative)


FORWARD_KL = Divergence(forward_kl, lambda log_p, log_q: -log_p.exp(), "forward_kl")
# The derivative is that of the KL: the teacher's entropy, by which they differ, is a constant.
SOFT_CROSS_ENTROPY = Divergence(
    lambda log_p, log_q: -(log_p.exp() * log_q).sum(-1), FORWARD_KL.derivative, "soft_cross_entropy"
)
"""-Σ p log q (MaKD eq. 18), which equals KL(T‖S) plus the teacher's entropy."""
# By the product rule: ∂/∂log q of q (log q - log p) is q (log q - log p) + q.
REVERSE_KL = Divergence(reverse_kl, lambda log_p, log_q: log_q.exp() * (log_q - log_p + 1), "reverse_kl")
# The sign of 0 is 0, so that the student's gradient vanishes where it equals the teacher.
TOTAL_VARIATION = Divergence(
    total_variation, lambda log_p, log_q: 0.5 * log_q.exp() * (log_q.exp() - log_p.exp()).sign(), "total_variation"
)


def log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log q - log p of the label; its mean over labels that the student has sampled is KL(S‖T)."""
    return log_q[:, 0] - log_p[:, 0]


def _policy_gradient(log_p: Tensor, log_q: Tensor) -> Tensor:
    import torch

    # (N, 2): the label, and all other tokens, on whose probability the estimate does not depend.
    return torch.stack([log_ratio(log_p, log_q), torch.zeros_like(log_q[:, 0])], dim=1)


LOG_RATIO = Divergence(log_ratio, _policy_gradient, of_labels=True)
"""KL(S‖T) by the tokens that the student has sampled alone. Instead of the derivative of the value, which is 1 for
every label, it has that of KL(S‖T) as the policy gradient estimates it: (log q - log p) ∂ log q at the label. Its mean
over samples is the gradient of `reverse_kl` (REINFORCE; on-policy distillation of Thinking Machines, 2025)."""


def jsd_with_derivative(beta: float) -> Divergence:
    """Return `jsd` with this β. M depends on S too; the other terms cancel: ∂/∂log q = (1-β) q (log q - log m)."""

    def derivative(log_p: Tensor, log_q: Tensor) -> Tensor:
        return (1 - beta) * log_q.exp() * (log_q - _log_mix(log_p, log_q, beta))

    return Divergence(partial(jsd, beta=beta), derivative, "jsd", beta)


def skew_forward_kl_with_derivative(alpha: float) -> Divergence:
    """Return `skew_forward_kl` with this α; ∂/∂log q = -p (1-α) q / m."""

    def derivative(log_p: Tensor, log_q: Tensor) -> Tensor:
        return -(1 - alpha) * (log_p + log_q - _log_mix(log_p, log_q, alpha)).exp()

    return Divergence(partial(skew_forward_kl, alpha=alpha), derivative, "skew_forward_kl", alpha)


def skew_reverse_kl_with_derivative(alpha: float) -> Divergence:
    """Return `skew_reverse_kl` with this α; ∂/∂log q = q (log q - log m + 1 - α q / m)."""

    def derivative(log_p: Tensor, log_q: Tensor) -> Tensor:
        log_ratio = log_q - _log_mix(log_q, log_p, alpha)
        return log_q.exp() * (log_ratio + 1 - alpha * log_ratio.exp())

    return Divergence(partial(skew_reverse_kl, alpha=alpha), derivative, "skew_reverse_kl", alpha)


@dataclass(frozen=True)
class DivergenceEntry:
    """A divergence that a user can choose by its name.

    With a teacher that gives its k most likely tokens, it compares k + 1 classes: these tokens, and all others
    together. For an f-divergence (all of ours but `log_ratio`, and Hellinger's) this is a lower bound of the divergence
    over all tokens; any other one is what its formula gives for these classes.
    """

    formula: str
    """Its formula or name, for the docs."""
    build: Callable[[Any], Divergence]
    """Makes the divergence from the settings of `kd`, of which a mixture takes its share."""
    preset: str | None = None
    """The name of `kd` with this divergence in comparisons; None if it has none of its own."""
    label: str = ""
    """The name of that preset in reports."""


DIVERGENCES: dict[str, DivergenceEntry] = {
    "forward_kl": DivergenceEntry("KL(teacher ‖ student)", lambda kd: FORWARD_KL),
    "reverse_kl": DivergenceEntry("KL(student ‖ teacher)", lambda kd: REVERSE_KL, "reverse_kl", "reverse KL"),
    "jsd": DivergenceEntry(
        "generalized Jensen-Shannon divergence (GKD's β)", lambda kd: jsd_with_derivative(kd.beta), "jsd", "JSD"
    ),
    "skew_forward_kl": DivergenceEntry(
        "skewed forward KL (DistiLLM's α)",
        lambda kd: skew_forward_kl_with_derivative(kd.alpha),
        "skew_kl",
        "skew KL",
    ),
    "skew_reverse_kl": DivergenceEntry(
        "skewed reverse KL (DistiLLM's α)",
        lambda kd: skew_reverse_kl_with_derivative(kd.alpha),
        "skew_reverse_kl",
        "skew reverse KL",
    ),
    "tvd": DivergenceEntry("total variation distance", lambda kd: TOTAL_VARIATION, "tvd", "TVD"),
    "log_ratio": DivergenceEntry("log q - log p of the sampled token", lambda kd: LOG_RATIO),
}
"""The divergences by the name that users type as `kd.divergence`, which is also the name of the term in the log."""
# At import, so that settings, help and tables know those of other packages as they know ours.
DIVERGENCES |= load_plugins("llmdistill.divergences", DIVERGENCES)


def output_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    *,
    divergence: Callable[[Tensor, Tensor], Tensor],
    temperature: float = 1.0,
    shift: bool = True,
) -> LossSum:
    """Sum a divergence of the softened distributions, times t², over the positions that predict a label.

    The factor t² keeps the scale of the gradient constant when the temperature changes (Hinton et al. 2015, §2).

    Args:
        student_logits: (B, T, V).
        teacher_logits: (B, T, V).
        labels: (B, T), IGNORE_INDEX where nothing is learned; only their positions matter, not their values.
        divergence: a function of log p (teacher) and log q (student), both (N, V), that returns (N,).
        temperature: t, greater than 0.
        shift: if True, position i predicts label i+1 (decoders); if False, label i (masked tokens of encoders).

    Returns:
        The sum over these positions, and their number.
    """
    chosen_BT = predicted_labels(labels, shift=shift) != IGNORE_INDEX
    log_p_NV = log_softmax(_gather_rows(teacher_logits, chosen_BT) / temperature)
    log_q_NV = log_softmax(_gather_rows(student_logits, chosen_BT) / temperature)
    return LossSum(temperature**2 * divergence(log_p_NV, log_q_NV).sum(), chosen_BT.sum())


def _gather_rows(logits: Tensor, chosen_BT: Tensor) -> Tensor:
    """Return the chosen rows, (N, V), at least fp32."""
    import torch

    # Gather before the cast, because V is large and most rows drop out.
    rows_NV = logits[chosen_BT]
    return rows_NV.to(torch.promote_types(rows_NV.dtype, torch.float32))


def log_softmax(logits_NV: Tensor) -> Tensor:
    """Return the log-probabilities of each row, none below LOG_FLOOR."""
    return logits_NV.log_softmax(-1).clamp(min=LOG_FLOOR)


def _log_mix(log_a: Tensor, log_b: Tensor, share: float) -> Tensor:
    """Compute log(share · a + (1-share) · b)."""
    # In log space: exp of both and the log of their sum would underflow to -inf for unlikely tokens.
    # The settings exclude the shares 0 and 1, one of whose logarithms is -inf.
    return (log_a + math.log(share)).logaddexp(log_b + math.log1p(-share))
