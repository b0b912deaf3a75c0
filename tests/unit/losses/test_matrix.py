from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmdistill.batch import LossSum
from llmdistill.losses.features import hidden_mse, matrix_mse

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
SHAPES = {"heads": (2, 3, 5, 4), "flat": (2, 5, 6)}


def make(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def naive(student: Tensor, teacher: Tensor, mask: Tensor, normalize: bool) -> float:
    """MaKD eq. 15, 16, token by token and head by head."""
    total = 0.0
    for b, t in mask.nonzero().tolist():
        s, r = (x[b, :, t] if x.dim() == 4 else x[b, t][None] for x in (student, teacher))
        heads = [
            sum((float(x) - float(y)) ** 2 for x, y in zip(p, q, strict=True)) / len(p)
            for p, q in zip(s, r, strict=True)
        ]
        error = sum(heads) / len(heads)
        if normalize:
            error /= sum(float(x) ** 2 for x in r.flatten()) / r.numel()
        total += error
    return total


def spoiled(tensor: Tensor, mask: Tensor) -> Tensor:
    """The same with NaN and inf where there is padding."""
    garbage = torch.full_like(tensor, torch.nan)
    garbage[..., ::2] = torch.inf
    real = mask.bool()[:, None, :, None] if tensor.dim() == 4 else mask.bool()[..., None]
    return torch.where(real, tensor, garbage)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_naive_loop(shape: tuple[int, ...], normalize: bool) -> None:
    student, teacher = make(shape, 0), make(shape, 1)
    loss = matrix_mse(student, teacher, MASK, normalize=normalize)
    assert loss.sum.item() == pytest.approx(naive(student, teacher, MASK, normalize), rel=1e-12)
    assert loss.count.item() == 7


def test_hidden_states_equal_the_naive_loop() -> None:
    student, teacher = make((2, 5, 6), 0), make((2, 5, 6), 1)
    for normalize in (False, True):
        loss = hidden_mse(student, teacher, MASK, normalize=normalize)
        assert loss.sum.item() == pytest.approx(naive(student, teacher, MASK, normalize), rel=1e-12)
        assert loss.count.item() == 7


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_zero_where_student_equals_teacher(shape: tuple[int, ...], normalize: bool) -> None:
    teacher = make(shape, 1).float()
    student = teacher.clone().requires_grad_()
    loss = matrix_mse(student, teacher, MASK, normalize=normalize)
    loss.sum.backward()
    assert loss.sum.item() == 0.0
    assert student.grad is not None
    assert not student.grad.any()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_padding_does_not_matter(shape: tuple[int, ...], normalize: bool) -> None:
    teacher = make(shape, 1)
    results: list[tuple[LossSum, Tensor]] = []
    for change in (lambda x: x, lambda x: spoiled(x, MASK)):
        student = change(make(shape, 0)).requires_grad_()
        loss = matrix_mse(student, change(teacher), MASK, normalize=normalize)
        loss.sum.backward()
        assert student.grad is not None
        results.append((loss, student.grad))
    (clean, clean_grad), (dirty, dirty_grad) = results
    assert dirty.sum.item() == clean.sum.item()
    assert torch.equal(dirty_grad, clean_grad)
    assert not dirty_grad[0, ..., 3:, :].any()  # padded positions get no gradient


def test_more_padding_changes_nothing() -> None:
    student, teacher = make((2, 5, 6), 0), make((2, 5, 6), 1)
    pad = (0, 0, 2, 3)
    longer = matrix_mse(
        torch.nn.functional.pad(student, pad),
        torch.nn.functional.pad(teacher, pad),
        torch.nn.functional.pad(MASK, (2, 3)),
    )
    shorter = matrix_mse(student, teacher, MASK)
    assert longer.sum.item() == pytest.approx(shorter.sum.item(), rel=1e-14)
    assert longer.count == shorter.count


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradient(shape: tuple[int, ...], normalize: bool) -> None:
    teacher = make(shape, 1)
    torch.autograd.gradcheck(
        lambda student: matrix_mse(student, teacher, MASK, normalize=normalize).sum, make(shape, 0).requires_grad_()
    )


def test_half_types_are_computed_in_fp32() -> None:
    student, teacher = make((2, 5, 6), 0).bfloat16(), make((2, 5, 6), 1).bfloat16()
    loss = matrix_mse(student, teacher, MASK)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(naive(student, teacher, MASK, False), rel=1e-6)


def test_a_teacher_row_of_zeros_does_not_blow_up() -> None:
    student, teacher = torch.ones(1, 1, 4), torch.zeros(1, 1, 4)
    loss = matrix_mse(student, teacher, torch.ones(1, 1), normalize=True)
    assert loss.sum.isfinite()


def test_nothing_but_the_gradient_is_kept() -> None:
    student = torch.randn(2, 3, 4, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append((x.shape, x.dtype)) or x, lambda x: x):
        loss = matrix_mse(student, torch.randn(2, 3, 4), torch.ones(2, 3))
    assert kept == [((2, 3, 4), torch.bfloat16)]
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss.sum, student, create_graph=True)
    with torch.no_grad():
        assert matrix_mse(student, student, torch.ones(2, 3)).sum.grad_fn is None
