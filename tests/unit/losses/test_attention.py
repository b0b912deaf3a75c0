from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.losses.attention import AttentionInputs, attention_kl

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
DIRECTIONS = ["student_teacher", "teacher_student"]


def make(seed: int, *, groups: int = 2, width: int = 3, heads: int = 4) -> AttentionInputs:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(2, heads, 5, width, dtype=torch.float64, generator=generator)
    key = 2 * torch.randn(2, groups, 5, width, dtype=torch.float64, generator=generator)
    return AttentionInputs(query, key, 0.7)


def naive(
    student: AttentionInputs,
    teacher: AttentionInputs,
    mask: Tensor,
    *,
    causal: bool,
    window: int | None,
    direction: str,
    horizon: Tensor | None = None,
) -> float:
    """MaKD eq. 3 and 12 with lists and loops."""
    heads, tokens = student.query.shape[1:3]

    def distribution(inputs: AttentionInputs, b: int, h: int, i: int, keys: list[int]) -> list[float]:
        group = h * inputs.key.shape[1] // heads
        scores = [inputs.scaling * float(inputs.query[b, h, i] @ inputs.key[b, group, j]) for j in keys]
        total = sum(math.exp(score) for score in scores)
        return [math.exp(score) / total for score in scores]

    result = 0.0
    for b, i in mask.nonzero().tolist():
        keys = [j for j in range(tokens) if mask[b, j] and (j <= i or not causal)]
        keys = [j for j in keys if window is None or j > i - window]
        keys = [j for j in keys if horizon is None or j < horizon[b, i]]
        for h in range(heads):
            p, q = distribution(student, b, h, i, keys), distribution(teacher, b, h, i, keys)
            if direction == "teacher_student":
                p, q = q, p
            result += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / heads
    return result


def spoiled(inputs: AttentionInputs, mask: Tensor) -> AttentionInputs:
    real = mask.bool()[:, None, :, None]
    query = torch.where(real, inputs.query, torch.full_like(inputs.query, torch.nan))
    key = torch.where(real, inputs.key, torch.full_like(inputs.key, torch.inf))
    return AttentionInputs(query.requires_grad_(), key.requires_grad_(), inputs.scaling)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2)])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_the_naive_loop(mask: Tensor, causal: bool, window: int | None, direction: str) -> None:
    student, teacher = make(0), make(1, groups=1, width=6)
    loss = attention_kl(student, teacher, mask, causal=causal, window=window, direction=direction)
    expected = naive(student, teacher, mask, causal=causal, window=window, direction=direction)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)
    assert loss.count.item() == mask.sum().item()
    assert expected > 0.1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_token_sees_no_key_beyond_its_horizon(direction: str) -> None:
    """A source of 2 tokens with a target of 1, and a source of 3 with a target of 2."""
    student, teacher = make(0), make(1, groups=1, width=6)
    horizon = torch.tensor([[2, 2, 3, 5, 5], [3, 3, 3, 4, 5]])
    given = {"causal": False, "window": None, "direction": direction}
    loss = attention_kl(student, teacher, MASKS["right"], horizon=horizon, **given)
    assert loss.sum.item() == pytest.approx(
        naive(student, teacher, MASKS["right"], horizon=horizon, **given), rel=1e-10
    )
    everything = attention_kl(student, teacher, MASKS["right"], **given)
    assert abs(loss.sum.item() - everything.sum.item()) > 0.1


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_keys_are_the_repeated_keys(groups: int) -> None:
    student, teacher = make(0, groups=groups), make(1, groups=groups)
    plain = [AttentionInputs(i.query, i.key.repeat_interleave(4 // groups, 1), i.scaling) for i in (student, teacher)]
    grouped = attention_kl(student, teacher, MASKS["right"], causal=True)
    repeated = attention_kl(*plain, MASKS["right"], causal=True)
    torch.testing.assert_close(grouped.sum, repeated.sum, rtol=1e-12, atol=0)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_zero_where_student_equals_teacher(causal: bool, direction: str) -> None:
    teacher = make(1)
    student = AttentionInputs(teacher.query.clone().requires_grad_(), teacher.key.clone().requires_grad_(), 0.7)
    loss = attention_kl(student, teacher, MASKS["left"], causal=causal, direction=direction)
    loss.sum.backward()
    assert loss.sum.item() == 0.0
    for gradient in (student.query.grad, student.key.grad):
        assert gradient is not None
        # Not bit-zero: a row of the softmax sums to one only up to rounding.
        assert gradient.abs().max() < 1e-14


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_does_not_matter(mask: Tensor, causal: bool, direction: str) -> None:
    results = []
    for inputs in (
        [AttentionInputs(i.query.requires_grad_(), i.key.requires_grad_(), i.scaling) for i in (make(0), make(1))],
        [spoiled(make(0), mask), spoiled(make(1), mask)],
    ):
        loss = attention_kl(*inputs, mask, causal=causal, direction=direction)
        loss.sum.backward()
        assert inputs[0].query.grad is not None
        assert inputs[0].key.grad is not None
        results.append((loss.sum.detach(), inputs[0].query.grad, inputs[0].key.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    padded = ~mask.bool()[:, None, :, None]
    assert not results[1][1].masked_select(padded).any()
    assert not results[1][2].masked_select(padded).any()


@pytest.mark.parametrize("side", [(0, 0, 3, 0), (0, 0, 0, 3)], ids=["left", "right"])
def test_more_padding_changes_nothing(side: tuple[int, ...]) -> None:
    student, teacher, mask = make(0), make(1), MASKS["right"]
    longer = [
        AttentionInputs(functional.pad(i.query, side), functional.pad(i.key, side), 0.7) for i in (student, teacher)
    ]
    for causal in (True, False):
        expected = attention_kl(student, teacher, mask, causal=causal)
        loss = attention_kl(*longer, functional.pad(mask, side[2:]), causal=causal)
        torch.testing.assert_close(loss.sum, expected.sum, rtol=1e-13, atol=0)
        assert loss.count == expected.count


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 2)])
def test_gradient(causal: bool, window: int | None, direction: str) -> None:
    student, teacher = make(0), make(1)

    def loss(query: Tensor, key: Tensor) -> Tensor:
        inputs = AttentionInputs(query, key, 0.7)
        return attention_kl(inputs, teacher, MASKS["left"], causal=causal, window=window, direction=direction).sum

    torch.autograd.gradcheck(loss, (student.query.requires_grad_(), student.key.requires_grad_()))


def test_half_types_are_computed_in_fp32() -> None:
    student, teacher = (AttentionInputs(i.query.bfloat16(), i.key.bfloat16(), i.scaling) for i in (make(0), make(1)))
    loss = attention_kl(student, teacher, MASKS["right"], causal=True)
    assert loss.sum.dtype == torch.float32
    double = [AttentionInputs(i.query.double(), i.key.double(), i.scaling) for i in (student, teacher)]
    expected = naive(*double, MASKS["right"], causal=True, window=None, direction="student_teacher")
    assert loss.sum.item() == pytest.approx(expected, rel=1e-5)


def test_extreme_scores_stay_finite() -> None:
    student, teacher = (
        AttentionInputs((100 * i.query.float()).requires_grad_(), 100 * i.key.float(), 1.0) for i in (make(0), make(1))
    )
    for direction in DIRECTIONS:
        loss = attention_kl(student, teacher, MASKS["left"], causal=True, direction=direction)
        (gradient,) = torch.autograd.grad(loss.sum, student.query)
        assert loss.sum.isfinite()
        assert gradient.isfinite().all()
