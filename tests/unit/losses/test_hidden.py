"""The cosine loss; the squared error of hidden states is tested beside that of matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.losses.features import hidden_cosine

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])


def make(seed: int) -> Tensor:
    return torch.randn(2, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(student: Tensor, teacher: Tensor, mask: Tensor) -> float:
    total = 0.0
    for b, t in mask.nonzero().tolist():
        s, r = student[b, t].tolist(), teacher[b, t].tolist()
        product = sum(x * y for x, y in zip(s, r, strict=True))
        total += 1 - product / math.sqrt(sum(x * x for x in s) * sum(y * y for y in r))
    return total


def test_equals_the_naive_loop() -> None:
    loss = hidden_cosine(make(0), make(1), MASK)
    assert loss.sum.item() == pytest.approx(naive(make(0), make(1), MASK), rel=1e-12)
    assert loss.count.item() == 7


def test_only_the_angle_counts() -> None:
    teacher = make(1)
    assert hidden_cosine(3 * teacher, teacher, MASK).sum.item() == pytest.approx(0, abs=1e-12)
    assert hidden_cosine(-teacher, teacher, MASK).sum.item() == pytest.approx(14)


def test_student_that_equals_its_teacher_stays() -> None:
    student = make(1).requires_grad_()
    loss = hidden_cosine(student, make(1), MASK)
    loss.sum.backward()
    assert abs(loss.sum.item()) < 1e-12
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-14


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_padding_does_not_matter(garbage: float) -> None:
    real = MASK.bool()[..., None]
    results = []
    for filling in (torch.tensor(1.0), torch.tensor(garbage)):
        student, teacher = (torch.where(real, make(seed), filling) for seed in (0, 1))
        student.requires_grad_()
        loss = hidden_cosine(student, teacher, MASK)
        loss.sum.backward()
        results.append((loss.sum.detach(), student.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[1][1].masked_select(~real).any()


@pytest.mark.parametrize("pad", [(0, 0, 2, 0), (0, 0, 0, 2)], ids=["left", "right"])
def test_more_padding_changes_nothing(pad: tuple[int, ...]) -> None:
    longer = hidden_cosine(*(functional.pad(make(seed), pad) for seed in (0, 1)), functional.pad(MASK, pad[2:]))
    shorter = hidden_cosine(make(0), make(1), MASK)
    torch.testing.assert_close(longer.sum, shorter.sum, rtol=1e-14, atol=0)
    assert longer.count == shorter.count


def test_gradient() -> None:
    torch.autograd.gradcheck(
        lambda student: hidden_cosine(student, make(1), MASK).sum,
        make(0).requires_grad_(),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_fp32(dtype: torch.dtype) -> None:
    student, teacher = make(0).to(dtype), make(1).to(dtype)
    loss = hidden_cosine(student, teacher, MASK)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(naive(student.double(), teacher.double(), MASK), rel=1e-6)


def test_a_hidden_state_of_zeros_is_no_error() -> None:
    student = torch.zeros(1, 2, 4, requires_grad=True)
    loss = hidden_cosine(student, torch.ones(1, 2, 4), torch.ones(1, 2))
    loss.sum.backward()
    assert loss.sum.item() == 2
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_other_widths_cannot_be_compared() -> None:
    with pytest.raises(AssertionError, match="student"):
        hidden_cosine(make(0), make(1)[..., :4], MASK)


def test_padding_adds_no_rounding_error() -> None:
    states = torch.ones(1, 2, 6)  # in fp32 their cosine is not quite one
    assert hidden_cosine(states, states, torch.ones(1, 2)).sum.item() != 0
    assert hidden_cosine(states, states, torch.zeros(1, 2)).sum.item() == 0
