import pytest
import torch
from plain_losses import token_losses_plain
from torch import Tensor

from llmdistill.batch import HeadInputs, LogitScale
from llmdistill.losses import divergence
from llmdistill.losses.fused import triton_head
from llmdistill.losses.fused.triton_head import kernel_losses
from llmdistill.losses.terms import BoundTokenTerms, TokenTerm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of words that nobody uses

LABEL, SMOOTHED = TokenTerm("label", None), TokenTerm("label", None, smoothing=0.3)
TERMS = {
    "label": [LABEL],
    "smoothed label": [SMOOTHED],
    "smoothed label and divergence": [SMOOTHED, TokenTerm("kl", divergence.FORWARD_KL, 2.0, 4.0)],
    "soft_cross_entropy": [TokenTerm("soft", divergence.SOFT_CROSS_ENTROPY, 2.0)],
    "forward_kl": [TokenTerm("kl", divergence.FORWARD_KL, 1.7, 2.5)],
    "reverse_kl": [TokenTerm("reverse", divergence.REVERSE_KL, 1.7, 2.5)],
    "jsd": [TokenTerm("jsd", divergence.jsd_with_derivative(0.3), 1.7, 2.5)],
    "skew_forward_kl": [TokenTerm("skew", divergence.skew_forward_kl_with_derivative(0.1))],
    "skew_reverse_kl": [TokenTerm("skew", divergence.skew_reverse_kl_with_derivative(0.1))],
    "total_variation": [TokenTerm("tvd", divergence.TOTAL_VARIATION, 0.5)],
    "three, mixed": [
        TokenTerm("label", None, 3.0, 5.0),  # of which neither counts
        TokenTerm("reverse", divergence.REVERSE_KL, 2.0, 4.0),
        TokenTerm("soft", divergence.SOFT_CROSS_ENTROPY, 1.5),
    ],
}
FACTORS = torch.tensor([0.3, 0.7, 0.2])


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_head, "LARGEST_BLOCK", 32)


def make(device: torch.device, dtype: torch.dtype = torch.float32, words: int = 75) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(3, words, generator=generator) for _ in range(2))
    labels = torch.randint(words, (3,), generator=generator)
    return student.to(device, dtype), teacher.to(device, dtype), labels.to(device)


def expected(student: Tensor, teacher: Tensor | None, labels: Tensor, terms: list[TokenTerm]) -> tuple[Tensor, Tensor]:
    """The sums and the gradient of the student's logits in fp64, by autograd."""
    ours = HeadInputs(student.double().requires_grad_(), None, None)
    theirs = None if teacher is None else HeadInputs(teacher.double(), None, None)
    losses = token_losses_plain(ours, theirs, labels, terms, FACTORS[: len(terms)].to(student.device))
    return losses.sums, torch.autograd.grad(losses.total, ours.rows)[0]


def run(student, teacher, labels, terms, *, with_gradient: bool = True) -> Tensor:
    factors = FACTORS[: len(terms)].to(student.device)
    return kernel_losses(student, teacher, labels, BoundTokenTerms(terms, factors), with_gradient=with_gradient)


def error(result: Tensor, reference: Tensor) -> float:
    return float((result - reference).norm() / reference.norm())


def check(student, teacher, labels, terms, tolerance: float = 1e-5) -> None:
    sums, gradient = expected(student, teacher, labels, terms)
    result = run(student, teacher, labels, terms)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), sums, rtol=1e-5, atol=0.0)
    assert error(student, gradient) < tolerance


@pytest.mark.parametrize(("case", "dtype", "tolerance"), [
    *((case, torch.float32, 1e-5) for case in TERMS),
    *((case, torch.bfloat16, 1e-2) for case in ("skew_forward_kl", "three, mixed")),
])  # fmt: skip
def test_equals_autograd_of_the_plain_formulas(device, case, dtype, tolerance) -> None:
    student, teacher, labels = make(device, dtype)
    kept = [student.clone(), teacher.clone()]
    if case in ("jsd", "smoothed label and divergence"):
        sums, _ = expected(student, teacher, labels, TERMS[case])
        result = run(student, teacher, labels, TERMS[case], with_gradient=False)
        torch.testing.assert_close(result.double(), sums, rtol=1e-5, atol=0.0)
        assert torch.equal(student, kept[0]), "without gradients the logits stay"
    check(student, teacher, labels, TERMS[case], tolerance)
    assert torch.equal(teacher, kept[1])


SCALES = [(LogitScale(0.25), LogitScale(3.0)), (LogitScale(1.5, 2.0), LogitScale(1.0, 5.0))]


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("case", ["forward_kl", "reverse_kl", "three, mixed", "smoothed label"])
def test_logits_with_a_factor_and_a_cap(device: torch.device, case: str, scales) -> None:
    student, teacher, labels = make(device)
    outputs = student.double().requires_grad_()
    logits = [
        scale.factor * side if scale.cap is None else scale.cap * (scale.factor * side / scale.cap).tanh()
        for side, scale in zip((outputs, teacher.double()), scales, strict=True)
    ]
    ours, theirs = (HeadInputs(side, None, None) for side in logits)
    factors = FACTORS[: len(TERMS[case])].to(device)
    losses = token_losses_plain(ours, theirs, labels, TERMS[case], factors)
    (gradient,) = torch.autograd.grad(losses.total, outputs)
    sums = kernel_losses(
        student, teacher, labels, BoundTokenTerms(TERMS[case], factors), scales=scales, with_gradient=True
    )
    torch.testing.assert_close(sums.double(), losses.sums, rtol=1e-5, atol=0.0)
    assert error(student, gradient) < 1e-5


@pytest.mark.parametrize("case", ["forward_kl", "reverse_kl", "jsd"])
def test_forbidden_words(device: torch.device, case: str) -> None:
    """Both forbid a word, then each alone; and a first block in which the student allows nothing."""
    student, teacher, labels = make(device)
    student[0, 5] = teacher[0, 5] = student[1, 6] = teacher[2, 7] = -torch.inf
    student[1, 40] = torch.finfo(torch.float32).min
    student[2, :32] = -torch.inf
    check(student, teacher, labels, TERMS[case])


def test_rows_of_a_wider_matrix_and_no_teacher(device: torch.device) -> None:
    wide, _, labels = make(device, words=90)
    rest = wide[:, 70:].clone()
    check(wide[:, :70], None, labels % 70, TERMS["label"])
    assert torch.equal(wide[:, 70:], rest)


def test_a_spoiled_row_spoils_no_other_and_no_rows_give_zero(device: torch.device) -> None:
    student, teacher, labels = make(device)
    _, gradient = expected(student, teacher, labels, TERMS["reverse_kl"])
    student[1, 3] = torch.nan
    run(student, teacher, labels, TERMS["reverse_kl"])
    assert student[1].isnan().any()
    assert error(student[[0, 2]], gradient[[0, 2]]) < 1e-5
    assert run(student[:0], teacher[:0], labels[:0], TERMS["forward_kl"]).tolist() == [0.0]
