"""Divergences from a teacher's most likely tokens, against the divergence of distributions that are merged plainly."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import HeadInputs
from llmdistill.losses import divergence
from llmdistill.losses.head import TokenLosses, token_losses
from llmdistill.losses.terms import TokenTerm
from llmdistill.losses.top_k import most_likely

LABEL = TokenTerm("label", None)
SOFT = TokenTerm("soft", divergence.SOFT_CROSS_ENTROPY, 2.0)
KL = TokenTerm("kl", divergence.FORWARD_KL)
BOUNDED = [
    KL,
    TokenTerm("kl at 2", divergence.FORWARD_KL, 2.0, 4.0),
    TokenTerm("reverse", divergence.REVERSE_KL, 1.5, 2.25),
    TokenTerm("jsd", divergence.jsd_with_derivative(0.3), 1.5),
    TokenTerm("skew forward", divergence.skew_forward_kl_with_derivative(0.1), 0.7),
    TokenTerm("skew reverse", divergence.skew_reverse_kl_with_derivative(0.4)),
    TokenTerm("tvd", divergence.TOTAL_VARIATION, 2.0),
]
TERMS = [*([term] for term in (*BOUNDED, SOFT)), [LABEL, KL], [LABEL, SOFT, *BOUNDED]]
TEMPERATURES = (0.7, 1.0, 1.5, 2.0)
N, V, W = 7, 19, 5
LABELS = torch.arange(N) % V


@pytest.fixture
def logits_NV() -> Tensor:
    return 3 * torch.randn(N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def student() -> HeadInputs:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((N, W), (V, W), (V,))]
    return HeadInputs(*(each.requires_grad_() for each in made))


def merge_plainly(p_NV: Tensor, tokens_Nk: Tensor) -> Tensor:
    """(N, k + 1) probabilities: each of the tokens, and the sum of all others."""
    of_others = p_NV.scatter(1, tokens_Nk, 0.0).sum(1, keepdim=True)
    return torch.cat([p_NV.gather(1, tokens_Nk), of_others], dim=1)


def plain(student, logits_NV, terms, factors, k):
    """By autograd, from the probabilities of all tokens."""
    student_NV = functional.linear(student.rows, student.weight, student.bias)
    tokens_Nk = logits_NV.argsort(dim=-1, descending=True)[:, :k]
    sums = []
    for term in terms:
        if term.divergence is None:
            sums.append(functional.cross_entropy(student_NV, LABELS, reduction="sum"))
            continue
        p_NC, q_NC = (
            merge_plainly((each / term.temperature).softmax(-1), tokens_Nk) for each in (logits_NV, student_NV)
        )
        sums.append(term.scale * term.divergence.value(p_NC.log(), q_NC.log()).sum())
    sums_C = torch.stack(sums)
    return TokenLosses((sums_C * factors).sum(), sums_C.detach())


@pytest.mark.parametrize("terms", TERMS, ids=lambda terms: ", ".join(term.name for term in terms))
@pytest.mark.parametrize("k", [1, 4, V - 1])
def test_values_and_gradients_are_those_of_merged_distributions(terms, k, student, logits_NV):
    factors = torch.tensor([0.5 + 0.25 * i for i in range(len(terms))], dtype=torch.float64)
    top = most_likely(logits_NV, k, TEMPERATURES)
    found = token_losses(student, top, LABELS, terms, factors, chunk=3)
    expected = plain(student, logits_NV, terms, factors, k)
    torch.testing.assert_close(found.sums, expected.sums)
    ours, theirs = (torch.autograd.grad(each.total, list(student.tensors)) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_logits_of_minus_infinity_stay_finite(student, logits_NV):
    logits_NV[:, 5:] = float("-inf")  # the tail of k = 5 has no mass
    bias_V = student.bias.detach().clone()
    bias_V[-3:] = float("-inf")
    student = student._replace(bias=bias_V)
    top = most_likely(logits_NV, 5, (1.0,))
    found = token_losses(student, top, LABELS % 5, [KL, LABEL], torch.ones(2))
    assert found.sums.isfinite().all()
    assert found.sums[0] < -divergence.LOG_FLOOR
    assert all(each.isfinite().all() for each in torch.autograd.grad(found.total, [student.rows]))
