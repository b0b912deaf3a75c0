from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, LossSum
from llmdistill.losses.divergence import SOFT_CROSS_ENTROPY, output_divergence

LABELS = torch.tensor([[-100, -100, 3, 1, -100], [-100, 0, 2, 4, 4]])


def soft_cross_entropy(
    student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float = 1.0, shift: bool = True
) -> LossSum:
    """As MaKD has it: without t²."""
    divergence = SOFT_CROSS_ENTROPY.value
    loss = output_divergence(student, teacher, labels, divergence=divergence, temperature=temperature, shift=shift)
    return LossSum(loss.sum / temperature**2, loss.count)


def make(seed: int) -> Tensor:
    return 3 * torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def predicting(shift: bool) -> list[tuple[int, int, int]]:
    """(sequence, position whose logits count, label)."""
    return [
        (b, i - 1 if shift else i, int(LABELS[b, i]))
        for b in range(2)
        for i in range(1 if shift else 0, 5)
        if LABELS[b, i] != IGNORE_INDEX
    ]


def log_softmax(row: Tensor, temperature: float = 1.0) -> list[float]:
    values = [float(x) / temperature for x in row]
    log_total = math.log(sum(math.exp(x) for x in values))
    return [x - log_total for x in values]


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_soft_cross_entropy_equals_the_naive_loop(temperature: float, shift: bool) -> None:
    student, teacher = make(0), make(1)
    expected = 0.0
    for b, i, _ in predicting(shift):
        log_p, log_q = log_softmax(teacher[b, i], temperature), log_softmax(student[b, i], temperature)
        expected -= sum(math.exp(x) * y for x, y in zip(log_p, log_q, strict=True))
    loss = soft_cross_entropy(student, teacher, LABELS, temperature=temperature, shift=shift)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-12)
    assert loss.count.item() == 6


def test_a_label_on_the_first_token_is_predicted_by_none() -> None:
    labels = LABELS.clone()
    labels[0, 0] = 5
    loss, expected = (soft_cross_entropy(make(0), make(1), each) for each in (labels, LABELS))
    assert loss.sum == expected.sum
    assert loss.count == expected.count


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_no_gradient_where_student_equals_teacher(temperature: float) -> None:
    teacher = make(1)
    student = teacher.clone().requires_grad_()
    soft_cross_entropy(student, teacher, LABELS, temperature=temperature).sum.backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-14


def test_rows_without_label_do_not_matter() -> None:
    real = functional.pad(LABELS[:, 1:] != IGNORE_INDEX, (0, 1))[..., None]
    gradients = []
    for garbage in (torch.zeros(()), torch.tensor(torch.nan), torch.tensor(torch.inf)):
        student = torch.where(real, make(0), garbage).requires_grad_()
        teacher = torch.where(real, make(1), garbage)
        loss = soft_cross_entropy(student, teacher, LABELS).sum
        loss.backward()
        assert student.grad is not None
        gradients.append((loss.detach(), student.grad))
    for value, gradient in gradients[1:]:
        assert torch.equal(value, gradients[0][0])
        assert torch.equal(gradient, gradients[0][1])
        assert not gradient.masked_select(~real).any()


@pytest.mark.parametrize("pad", [(0, 0, 2, 0), (0, 0, 0, 2)], ids=["left", "right"])
def test_more_padding_changes_nothing(pad: tuple[int, ...]) -> None:
    student, teacher, labels = functional.pad(make(0), pad), functional.pad(make(1), pad), LABELS
    longer = functional.pad(labels, pad[2:], value=IGNORE_INDEX)
    loss, expected = soft_cross_entropy(student, teacher, longer), soft_cross_entropy(make(0), make(1), labels)
    assert loss.sum == expected.sum
    assert loss.count == expected.count


def test_gradients() -> None:
    teacher = make(1)
    torch.autograd.gradcheck(
        lambda s: soft_cross_entropy(s, teacher, LABELS, temperature=1.7).sum, make(0).requires_grad_()
    )


def test_without_any_label_the_loss_is_zero_and_has_a_gradient() -> None:
    labels = torch.full((2, 5), IGNORE_INDEX)
    student = make(0).requires_grad_()
    loss = soft_cross_entropy(student, make(1), labels)
    loss.sum.backward()
    assert loss.sum.item() == loss.count.item() == 0
    assert student.grad is not None
    assert not student.grad.any()


def test_half_types_are_computed_in_fp32() -> None:
    student, teacher = make(0).bfloat16(), make(1).bfloat16()
    loss = soft_cross_entropy(student, teacher, LABELS)
    expected = soft_cross_entropy(student.double(), teacher.double(), LABELS)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(expected.sum.item(), rel=1e-6)
