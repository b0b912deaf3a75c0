"""Divergences from the k most likely tokens of a teacher, with all other tokens together as one more class, the rest.

Both distributions are merged into k + 1 classes, so each is still a proper distribution, and a divergence of
`losses.divergence` compares the merged ones. By the data-processing inequality the result is a lower bound of the
divergence over all tokens (KL in both directions, Jensen-Shannon, skew KL, total variation). With T' and S' for the two
models' distributions within the rest, and p and q for its mass, the bound lacks

    KL(T‖S):              p KL(T'‖S')
    KL(S‖T):              q KL(S'‖T')
    total variation:      at most min(p, q) TV(T', S')
    soft cross-entropy:   p (KL(T'‖S') + the entropy of T'), of which the student changes only the first

at the temperature of the term. The gradient is the exact one of the merged divergence: it moves the rest as a whole and
keeps the proportions within it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmdistill.batch import TopK
from llmdistill.errors import UserError


def most_likely(logits_NV: Tensor, k: int, temperatures: Sequence[float]) -> TopK:
    """Return the k most likely tokens of each row, and the mass of the rest at each temperature, from (N, V) logits."""
    exact = torch.promote_types(logits_NV.dtype, torch.float32)
    log_p_NV = logits_NV.to(exact).log_softmax(-1)
    log_p_Nk, tokens_Nk = log_p_NV.topk(k, dim=-1)
    # In place: topk has copied these values, and N x V is large.
    rest_NV = log_p_NV.scatter_(1, tokens_Nk, float("-inf"))
    return TopK(tokens_Nk, log_p_Nk, {t: (rest_NV / t).logsumexp(-1) for t in temperatures})


def soften(teacher: TopK, temperature: float) -> Tensor:
    """Return the teacher's log-probabilities at a temperature of `TopK.rest`, (N, k + 1); the rest comes last."""
    rest_N = teacher.rest.get(temperature)
    if rest_N is None:
        known = ", ".join(f"{temperature:g}" for temperature in teacher.rest)
        raise UserError(
            f"a term compares at temperature {temperature:g}, and the teacher gives the mass of its less likely tokens "
            f"at {known}: take such a temperature, or a teacher that gives its whole distributions"
        )
    # Log-probabilities are logits but for a constant of their row, so this is the softmax of the logits at t.
    return torch.cat([teacher.log_probs / temperature, rest_N[:, None]], dim=1).log_softmax(-1)


def merge(log_q_NV: Tensor, tokens_Nk: Tensor) -> Tensor:
    """Return the student's log-probabilities of these tokens, and last that of all others together, (N, k + 1)."""
    # -inf takes the k tokens out of the sum, and gives them no gradient through it.
    rest_NV = log_q_NV.scatter(1, tokens_Nk, float("-inf"))
    return torch.cat([log_q_NV.gather(1, tokens_Nk), rest_NV.logsumexp(-1, keepdim=True)], dim=1)


def spread(derivative_NC: Tensor, log_q_NV: Tensor, merged_NC: Tensor, tokens_Nk: Tensor) -> Tensor:
    """Return the derivative with respect to log q of each token, (N, V), from that with respect to log q of each class.

    A token's share of its class is its share of the probability: 1 for a class of one token, q / Σ q in the rest.
    `merged_NC` is what `merge` makes of `log_q_NV`.
    """
    # The exponentials of the k tokens may overflow here; they are overwritten.
    derivative_NV = (log_q_NV - merged_NC[:, -1:]).exp_().mul_(derivative_NC[:, -1:])
    return derivative_NV.scatter_(1, tokens_Nk, derivative_NC[:, :-1])
