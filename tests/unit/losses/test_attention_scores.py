from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.losses.attention import AttentionInputs, attention_score_mse

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
VISIBILITY = [(True, None), (False, None), (True, 2)]


def make(seed: int, *, groups: int = 2, width: int = 3, heads: int = 4, scaling: float = 0.7) -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(2, heads, 5, width, dtype=torch.float64, generator=generator)
    key = 2 * torch.randn(2, groups, 5, width, dtype=torch.float64, generator=generator)
    return AttentionInputs(query, key, scaling)


def naive(
    student: AttentionInputs, teacher: AttentionInputs, mask: Tensor, *, causal: bool, window: int | None
) -> float:
    """TinyBERT eq. 7, score by score."""
    heads, tokens = student.query.shape[1:3]

    def score(inputs: AttentionInputs, b: int, h: int, i: int, j: int) -> float:
        return inputs.scaling * float(inputs.query[b, h, i] @ inputs.key[b, h * inputs.key.shape[1] // heads, j])

    result = 0.0
    for b, i in mask.nonzero().tolist():
        keys = [j for j in range(tokens) if mask[b, j] and (j <= i or not causal)]
        keys = [j for j in keys if window is None or j > i - window]
        squares = [(score(student, b, h, i, j) - score(teacher, b, h, i, j)) ** 2 for h in range(heads) for j in keys]
        result += sum(squares) / len(squares)
    return result


def spoiled(inputs: AttentionInputs, mask: Tensor) -> AttentionInputs:
    real = mask.bool()[:, None, :, None]
    query = torch.where(real, inputs.query, torch.full_like(inputs.query, torch.nan))
    key = torch.where(real, inputs.key, torch.full_like(inputs.key, torch.inf))
    return AttentionInputs(query.requires_grad_(), key.requires_grad_(), inputs.scaling)


@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_the_naive_loop(mask: Tensor, causal: bool, window: int | None) -> None:
    student, teacher = make(0), make(1, groups=1, width=6, scaling=0.3)
    loss = attention_score_mse(student, teacher, mask, causal=causal, window=window)
    expected = naive(student, teacher, mask, causal=causal, window=window)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)
    assert loss.count.item() == mask.sum().item()


def test_zero_where_student_equals_teacher() -> None:
    teacher = make(1)
    student = AttentionInputs(teacher.query.clone().requires_grad_(), teacher.key.clone().requires_grad_(), 0.7)
    loss = attention_score_mse(student, teacher, MASKS["left"], causal=True)
    loss.sum.backward()
    assert loss.sum.item() == 0.0
    assert student.query.grad is not None
    assert not student.query.grad.any()


@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_does_not_matter(mask: Tensor, causal: bool, window: int | None) -> None:
    results = []
    for student, teacher in (
        (AttentionInputs(make(0).query.requires_grad_(), make(0).key.requires_grad_(), 0.7), make(1)),
        (spoiled(make(0), mask), spoiled(make(1), mask)),
    ):
        loss = attention_score_mse(student, teacher, mask, causal=causal, window=window)
        loss.sum.backward()
        results.append((loss.sum.detach(), student.query.grad, student.key.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    padded = ~mask.bool()[:, None, :, None]
    assert not results[1][1].masked_select(padded).any()
    assert not results[1][2].masked_select(padded).any()


@pytest.mark.parametrize("side", [(0, 0, 3, 0), (0, 0, 0, 3)], ids=["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
def test_more_padding_changes_nothing(causal: bool, side: tuple[int, ...]) -> None:
    student, teacher, mask = make(0), make(1), MASKS["right"]
    longer = [
        AttentionInputs(functional.pad(i.query, side), functional.pad(i.key, side), 0.7) for i in (student, teacher)
    ]
    expected = attention_score_mse(student, teacher, mask, causal=causal)
    loss = attention_score_mse(*longer, functional.pad(mask, side[2:]), causal=causal)
    torch.testing.assert_close(loss.sum, expected.sum, rtol=1e-13, atol=0)
    assert loss.count == expected.count


@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
def test_gradient(causal: bool, window: int | None) -> None:
    student, teacher = make(0), make(1)
    torch.autograd.gradcheck(
        lambda query, key: (
            attention_score_mse(
                AttentionInputs(query, key, 0.7), teacher, MASKS["left"], causal=causal, window=window
            ).sum
        ),
        (student.query.requires_grad_(), student.key.requires_grad_()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_fp32(dtype: torch.dtype) -> None:
    student, teacher = (AttentionInputs(i.query.to(dtype), i.key.to(dtype), i.scaling) for i in (make(0), make(1)))
    loss = attention_score_mse(student, teacher, MASKS["right"], causal=True)
    assert loss.sum.dtype == torch.float32
    double = [AttentionInputs(i.query.double(), i.key.double(), i.scaling) for i in (student, teacher)]
    expected = naive(*double, MASKS["right"], causal=True, window=None)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-5)


def test_other_head_numbers_cannot_be_compared() -> None:
    with pytest.raises(AssertionError, match="same number of heads"):
        attention_score_mse(make(0), make(1, heads=2), MASKS["right"], causal=True)
