"""Distances of hidden states and matrices; tests/unit/methods compares their values with loops over tokens."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from llmdistill.losses.features import hidden_cosine, hidden_mse, matrix_mse

MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
LOSSES = {
    "heads": (matrix_mse, (2, 3, 5, 4)),
    "heads normalized": (partial(matrix_mse, normalize=True), (2, 3, 5, 4)),
    "flat": (hidden_mse, (2, 5, 6)),
    "flat normalized": (partial(hidden_mse, normalize=True), (2, 5, 6)),
    "cosine": (hidden_cosine, (2, 5, 6)),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def make(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def real_places(tensor: Tensor) -> Tensor:
    return MASK.bool()[:, None, :, None] if tensor.dim() == 4 else MASK.bool()[..., None]


@every_loss
def test_half_precision_is_computed_in_fp32(name: str) -> None:
    loss_of, shape = LOSSES[name]
    student, teacher = make(shape, 0).bfloat16(), make(shape, 1).bfloat16()
    loss = loss_of(student, teacher, MASK)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == pytest.approx(loss_of(student.double(), teacher.double(), MASK).sum.item(), rel=1e-6)
    assert loss.count.item() == 7


@every_loss
def test_padding_does_not_matter(name: str) -> None:
    loss_of, shape = LOSSES[name]
    results = []
    for filling in (1.0, math.nan):
        student, teacher = (torch.where(real_places(x), x, filling) for x in (make(shape, 0), make(shape, 1)))
        loss = loss_of(student.requires_grad_(), teacher, MASK)
        loss.sum.backward()
        results.append((loss.sum.detach(), student.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    assert not results[1][1].masked_select(~real_places(results[1][1])).any()


@every_loss
def test_gradient(name: str) -> None:
    loss_of, shape = LOSSES[name]
    teacher = make(shape, 1)
    torch.autograd.gradcheck(lambda student: loss_of(student, teacher, MASK).sum, make(shape, 0).requires_grad_())
    assert loss_of(teacher, teacher, MASK).sum.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", [name for name in LOSSES if "normalized" in name])
@pytest.mark.parametrize("scale", [1e-2, 1e3])
def test_a_normalized_error_has_no_scale(name: str, scale: float) -> None:
    """Down to a mean square of 1e-6, below which an error counts as that of a teacher of this square."""
    loss_of, shape = LOSSES[name]
    student, teacher = make(shape, 0), make(shape, 1)
    expected = loss_of(student, teacher, MASK).sum.item()
    assert loss_of(scale * student, scale * teacher, MASK).sum.item() == pytest.approx(expected, rel=1e-9)
    ones = torch.ones_like(teacher)
    floor = loss_of(3e-5 * ones, 2e-5 * ones, MASK).sum.item()
    assert floor == pytest.approx(7 * 1e-10 / 1e-6, rel=1e-9)


def test_states_of_zeros_are_no_error() -> None:
    student = torch.zeros(1, 2, 4, requires_grad=True)
    loss = hidden_cosine(student, torch.ones(1, 2, 4), torch.ones(1, 2))
    loss.sum.backward()
    assert loss.sum.item() == 2
    assert student.grad.isfinite().all()
    assert matrix_mse(torch.ones(1, 1, 4), torch.zeros(1, 1, 4), torch.ones(1, 1), normalize=True).sum.isfinite()
