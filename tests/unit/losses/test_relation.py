from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.losses.attention import (
    AttentionInputs,
    RelationInputs,
    attention_kl,
    relation_kl,
    repeat_heads,
    side_by_side,
)

MASKS = {
    "right": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    "left": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}
VISIBILITY = [(True, None), (False, None), (True, 2)]
HEADS = {"same heads": (4, 4), "fewer on the right": (4, 2), "fewer on the left": (1, 4)}


def make(seed: int, heads: tuple[int, int] = (4, 4), width: int = 3) -> RelationInputs:
    generator = torch.Generator().manual_seed(seed)
    left, right = (2 * torch.randn(2, each, 5, width, dtype=torch.float64, generator=generator) for each in heads)
    return RelationInputs(left, right)


def rows(side: Tensor, heads: int, b: int, t: int) -> list[float]:
    """The features of one token, head after head; head h is that of group h // (heads/groups)."""
    groups = side.shape[1]
    return [float(x) for h in range(heads) for x in side[b, h // (heads // groups), t]]


def naive(student: RelationInputs, teacher: RelationInputs, mask: Tensor, relation_heads: int, **seen: object) -> float:
    """MiniLMv2 eq. 6-8 with lists and loops."""
    tokens = mask.shape[1]

    def distribution(sides: RelationInputs, b: int, a: int, i: int, keys: list[int]) -> list[float]:
        heads = max(sides.left.shape[1], sides.right.shape[1])
        width = heads * sides.left.shape[-1] // relation_heads
        cut = slice(a * width, (a + 1) * width)
        left = rows(sides.left, heads, b, i)[cut]
        scores = [
            sum(x * y for x, y in zip(left, rows(sides.right, heads, b, j)[cut], strict=True)) / math.sqrt(width)
            for j in keys
        ]
        total = sum(math.exp(score) for score in scores)
        return [math.exp(score) / total for score in scores]

    result = 0.0
    for b, i in mask.nonzero().tolist():
        keys = [j for j in range(tokens) if mask[b, j] and (j <= i or not seen["causal"])]
        keys = [j for j in keys if seen["window"] is None or j > i - seen["window"]]
        for a in range(relation_heads):
            p, q = distribution(teacher, b, a, i, keys), distribution(student, b, a, i, keys)
            result += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / relation_heads
    return result


def spoiled(sides: RelationInputs, mask: Tensor) -> RelationInputs:
    real = mask.bool()[:, None, :, None]
    left = torch.where(real, sides.left, torch.full_like(sides.left, torch.nan))
    right = torch.where(real, sides.right, torch.full_like(sides.right, torch.inf))
    return RelationInputs(left.requires_grad_(), right.requires_grad_())


@pytest.mark.parametrize("relation_heads", [1, 2, 6])
@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_equals_the_naive_loop(
    heads: tuple[int, int], mask: Tensor, causal: bool, window: int | None, relation_heads: int
) -> None:
    student, teacher = make(0, heads), make(1, heads, width=6)
    loss = relation_kl(student, teacher, mask, relation_heads=relation_heads, causal=causal, window=window)
    expected = naive(student, teacher, mask, relation_heads, causal=causal, window=window)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)
    assert loss.count.item() == mask.sum().item()
    assert expected > 0.1


def test_models_of_other_head_numbers_are_compared() -> None:
    """2 heads of 6 against 3 heads of 8: 4 relation heads are pieces of several heads, or of one."""
    student, teacher = make(0, (2, 2), width=6), make(1, (3, 3), width=8)
    loss = relation_kl(student, teacher, MASKS["left"], relation_heads=4, causal=False)
    expected = naive(student, teacher, MASKS["left"], 4, causal=False, window=None)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
def test_queries_and_keys_at_the_attention_heads_are_the_attention(
    groups: int, causal: bool, window: int | None
) -> None:
    student, teacher = make(0, (4, groups), width=3), make(1, (4, groups), width=5)
    loss = relation_kl(student, teacher, MASKS["left"], relation_heads=4, causal=causal, window=window)
    attention = attention_kl(
        *(AttentionInputs(*sides, sides.left.shape[-1] ** -0.5) for sides in (student, teacher)),
        MASKS["left"],
        causal=causal,
        window=window,
        direction="teacher_student",
    )
    torch.testing.assert_close(loss.sum, attention.sum, rtol=1e-12, atol=0)
    assert loss.count == attention.count


def test_values_of_groups_are_not_repeated_among_themselves() -> None:
    """V-V of two groups, cut into two heads, is each group against itself."""
    student, teacher = (RelationInputs(side, side) for side in (make(0, (2, 2)).left, make(1, (2, 2)).left))
    loss = relation_kl(student, teacher, MASKS["right"], relation_heads=2, causal=True)
    by_group = [
        relation_kl(
            *(RelationInputs(sides.left[:, g : g + 1], sides.left[:, g : g + 1]) for sides in (student, teacher)),
            MASKS["right"],
            relation_heads=1,
            causal=True,
        ).sum
        for g in range(2)
    ]
    torch.testing.assert_close(loss.sum, sum(by_group) / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_zero_where_student_equals_teacher(causal: bool) -> None:
    teacher = make(1, (4, 2))
    student = RelationInputs(*(side.clone().requires_grad_() for side in teacher))
    loss = relation_kl(student, teacher, MASKS["left"], relation_heads=6, causal=causal)
    loss.sum.backward()
    assert loss.sum.item() == 0.0
    for side in student:
        assert side.grad is not None
        assert side.grad.abs().max() < 1e-14  # a row of the softmax sums to one only up to rounding


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_does_not_matter(mask: Tensor, causal: bool) -> None:
    results = []
    for student, teacher in (
        (RelationInputs(*(side.requires_grad_() for side in make(0))), make(1)),
        (spoiled(make(0), mask), spoiled(make(1), mask)),
    ):
        loss = relation_kl(student, teacher, mask, relation_heads=2, causal=causal)
        loss.sum.backward()
        results.append((loss.sum.detach(), student.left.grad, student.right.grad))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
    padded = ~mask.bool()[:, None, :, None]
    assert not results[1][1].masked_select(padded).any()
    assert not results[1][2].masked_select(padded).any()


@pytest.mark.parametrize("side", [(0, 0, 3, 0), (0, 0, 0, 3)], ids=["left", "right"])
@pytest.mark.parametrize("causal", [True, False])
def test_more_padding_changes_nothing(causal: bool, side: tuple[int, ...]) -> None:
    student, teacher, mask = make(0, (4, 2)), make(1, (4, 2)), MASKS["right"]
    expected = relation_kl(student, teacher, mask, relation_heads=2, causal=causal)
    longer = [RelationInputs(*(functional.pad(each, side) for each in sides)) for sides in (student, teacher)]
    loss = relation_kl(*longer, functional.pad(mask, side[2:]), relation_heads=2, causal=causal)
    torch.testing.assert_close(loss.sum, expected.sum, rtol=1e-13, atol=0)
    assert loss.count == expected.count


@pytest.mark.parametrize("heads", [(2, 2), (2, 1)], ids=["same heads", "groups"])
@pytest.mark.parametrize(("causal", "window"), VISIBILITY)
def test_gradient(causal: bool, window: int | None, heads: tuple[int, int]) -> None:
    student, teacher = make(0, heads, width=2), make(1, heads, width=2)

    def loss(left: Tensor, right: Tensor) -> Tensor:
        sides = RelationInputs(left, right)
        return relation_kl(sides, teacher, MASKS["left"], relation_heads=4, causal=causal, window=window).sum

    torch.autograd.gradcheck(loss, tuple(side.requires_grad_() for side in student))


def test_gradient_of_a_side_with_itself() -> None:
    teacher = RelationInputs(make(1, (2, 2)).left, make(1, (2, 2)).left)
    torch.autograd.gradcheck(
        lambda side: (
            relation_kl(RelationInputs(side, side), teacher, MASKS["left"], relation_heads=3, causal=False).sum
        ),
        make(0, (2, 2)).left.requires_grad_(),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_fp32(dtype: torch.dtype) -> None:
    student, teacher = (RelationInputs(*(side.to(dtype) for side in make(seed))) for seed in (0, 1))
    loss = relation_kl(student, teacher, MASKS["right"], relation_heads=2, causal=True)
    assert loss.sum.dtype == torch.float32
    double = [RelationInputs(*(side.double() for side in sides)) for sides in (student, teacher)]
    expected = naive(*double, MASKS["right"], 2, causal=True, window=None)
    assert loss.sum.item() == pytest.approx(expected, rel=1e-5)


def test_extreme_scores_stay_finite() -> None:
    student = RelationInputs(*((100 * side.float()).requires_grad_() for side in make(0)))
    teacher = RelationInputs(*(100 * side.float() for side in make(1)))
    loss = relation_kl(student, teacher, MASKS["left"], relation_heads=2, causal=True)
    gradients = torch.autograd.grad(loss.sum, list(student))
    assert loss.sum.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(AssertionError, match="5 relation heads do not divide a width of 12"):
        relation_kl(make(0), make(1), MASKS["left"], relation_heads=5, causal=True)
    with pytest.raises(AssertionError, match="4 heads are no multiple of 3"):
        relation_kl(make(0, (4, 3)), make(1, (4, 3)), MASKS["left"], relation_heads=4, causal=True)


def test_heads_repeated_and_side_by_side() -> None:
    tensor = torch.arange(12.0).reshape(1, 2, 2, 3)
    assert torch.equal(repeat_heads(tensor, 4)[0, :, 0, 0], torch.tensor([0.0, 0.0, 6.0, 6.0]))
    assert repeat_heads(tensor, 2) is tensor
    assert side_by_side(tensor).tolist() == [[[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]]
