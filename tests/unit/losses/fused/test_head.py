from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from llmdistill.losses import divergence
from llmdistill.losses.fused import triton_head as head
from llmdistill.losses.terms import TokenTerm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of words that nobody uses


class Term(NamedTuple):
    kind: str
    temperature: float = 1.0
    scale: float = 1.0
    share: float = 0.5
    smoothing: float = 0.0


SHARED = {"jsd", "skew_forward_kl", "skew_reverse_kl"}
TERMS = {
    "label": [Term("label")],
    "smoothed label": [Term("label", smoothing=0.3)],
    "smoothed label and divergence": [Term("label", smoothing=0.3), Term("forward_kl", 2.0, 4.0)],
    "soft_cross_entropy": [Term("soft_cross_entropy", 2.0)],
    "forward_kl": [Term("forward_kl", 1.7, 2.5)],
    "reverse_kl": [Term("reverse_kl", 1.7, 2.5)],
    "jsd": [Term("jsd", 1.7, 2.5, 0.3)],
    "skew_forward_kl": [Term("skew_forward_kl", share=0.1)],
    "skew_reverse_kl": [Term("skew_reverse_kl", share=0.1)],
    "total_variation": [Term("total_variation", 0.5)],
    "three, mixed": [Term("label", 3.0, 5.0), Term("reverse_kl", 2.0, 4.0), Term("soft_cross_entropy", 1.5)],
}


def chunk_losses(student, teacher, labels, terms, factors, *, with_gradient) -> Tensor:
    """The kernel takes a divergence by its name; its functions are not called."""

    def divergence_of(term: Term) -> divergence.Divergence | None:
        unused = divergence.FORWARD_KL
        return None if term.kind == "label" else unused._replace(kernel=term.kind, share=term.share)

    given = [TokenTerm(term.kind, divergence_of(term), term.temperature, term.scale, term.smoothing) for term in terms]
    return head.chunk_losses(student, teacher, labels, given, factors, with_gradient=with_gradient)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LARGEST_BLOCK", 32)


def make(device: torch.device, dtype: torch.dtype = torch.float32, words: int = 75) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(3, words, generator=generator) for _ in range(2))
    labels = torch.randint(words, (3,), generator=generator)
    return student.to(device, dtype), teacher.to(device, dtype), labels.to(device)


def naive(term: Term, student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """One term's sum in fp64 and plain torch, with the formulas that the library has for whole matrices."""
    student, teacher = student.double(), teacher.double()
    if term.kind == "label":
        kept = 1 - term.smoothing
        expected = [kept * row[y] + term.smoothing * row.mean() for row, y in zip(student, labels, strict=True)]
        return torch.stack([row.logsumexp(0) - mean for row, mean in zip(student, expected, strict=True)]).sum()
    log_p, log_q = ((x / term.temperature).log_softmax(-1).clamp(min=-1e5) for x in (teacher, student))
    if term.kind == "soft_cross_entropy":
        return -term.scale * (log_p.exp() * log_q).sum()
    share = (term.share,) if term.kind in SHARED else ()
    return term.scale * getattr(divergence, term.kind)(log_p, log_q, *share).sum()


def expected(terms: list[Term], factors: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    student, teacher, labels = inputs
    student = student.double().requires_grad_()
    sums = torch.stack([naive(term, student, teacher, labels) for term in terms])
    (gradient,) = torch.autograd.grad(sums @ factors.double(), student)
    return sums.detach(), gradient


def error(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).norm() / reference.norm())


def factors_of(terms: list[Term], device: torch.device) -> Tensor:
    return torch.tensor([0.3, 0.7, 0.2], device=device)[: len(terms)]


@pytest.mark.parametrize(("case", "dtype", "tolerance"), [
    *((case, torch.float32, 1e-5) for case in TERMS),
    *((case, torch.bfloat16, 1e-2) for case in ("skew_forward_kl", "three, mixed")),
])  # fmt: skip
def test_equals_autograd_of_the_plain_formulas(device, case, dtype, tolerance) -> None:
    student, teacher, labels = make(device, dtype)
    terms, factors = TERMS[case], factors_of(TERMS[case], device)
    sums, gradient = expected(terms, factors, student, teacher, labels)
    kept = [student.clone(), teacher.clone()]
    if case in ("jsd", "smoothed label and divergence"):
        result = chunk_losses(student, teacher, labels, terms, factors, with_gradient=False)
        torch.testing.assert_close(result.double(), sums, rtol=1e-5, atol=0.0)
        assert torch.equal(student, kept[0]), "without gradients the logits stay"
    result = chunk_losses(student, teacher, labels, terms, factors, with_gradient=True)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), sums, rtol=1e-5, atol=0.0)
    assert error(student, gradient) < tolerance
    assert torch.equal(teacher, kept[1])


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_forbidden_words(device: torch.device, kind: str) -> None:
    """Both forbid a word, then each alone; and a first block in which the student allows nothing."""
    student, teacher, labels = make(device)
    student[0, 5] = teacher[0, 5] = student[1, 6] = teacher[2, 7] = -torch.inf
    student[1, 40] = torch.finfo(torch.float32).min
    student[2, :32] = -torch.inf
    terms = [Term(kind, 2.0)]
    factors = factors_of(terms, device)
    sums, gradient = expected(terms, factors, student, teacher, labels)
    result = chunk_losses(student, teacher, labels, terms, factors, with_gradient=True)
    torch.testing.assert_close(result.double(), sums, rtol=1e-5, atol=0.0)
    assert error(student, gradient) < 1e-5


def test_rows_of_a_wider_matrix_and_no_teacher(device: torch.device) -> None:
    wide, _, labels = make(device, words=90)
    student, factors, labels = wide[:, :70], torch.ones(1, device=device), labels % 70
    rest = wide[:, 70:].clone()
    sums, gradient = expected(TERMS["label"], factors, student, student, labels)
    result = chunk_losses(student, None, labels, TERMS["label"], factors, with_gradient=True)
    torch.testing.assert_close(result.double(), sums, rtol=1e-5, atol=0.0)
    assert error(student, gradient) < 1e-5
    assert torch.equal(wide[:, 70:], rest)


def test_a_spoiled_row_spoils_no_other(device: torch.device) -> None:
    student, teacher, labels = make(device)
    terms, factors = TERMS["reverse_kl"], torch.ones(1, device=device)
    _, gradient = expected(terms, factors, student, teacher, labels)
    student[1, 3] = torch.nan
    chunk_losses(student, teacher, labels, terms, factors, with_gradient=True)
    assert student[1].isnan().any()
    assert error(student[[0, 2]], gradient[[0, 2]]) < 1e-5


def test_no_rows(device: torch.device) -> None:
    student, teacher, labels = (each[:0] for each in make(device))
    result = chunk_losses(student, teacher, labels, TERMS["forward_kl"], torch.ones(1), with_gradient=True)
    assert result.tolist() == [0.0]
