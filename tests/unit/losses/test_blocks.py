import math
from functools import partial

import pytest
import torch
from plain_losses import attention_kl_plain, attention_score_mse_plain, relation_kl_plain
from torch import Tensor

from llmdistill.attention_mask import AttentionMask
from llmdistill.losses.attention import AttentionInputs, RelationInputs, attention_kl, attention_score_mse, relation_kl
from llmdistill.losses.fused import blocks
from llmdistill.losses.fused.blocks import BlockShape, block_loss

from support import shapes_of_results

TOKENS = 23
MASKS = {
    "full": torch.ones(3, TOKENS, dtype=torch.long),
    "padded": torch.tensor([[1] * 23, [0] * 4 + [1] * 19, [1] * 2 + [0] * 21]),
    "packed": torch.tensor([[1] * 9 + [2] * 5 + [3] * 9, [1] * 20 + [0] * 3, [0] * 2 + [1] * 3 + [2] * 18]),
}
SHAPES = [BlockShape(1, 4, 5), BlockShape(2, 8, 23), BlockShape(3, 8, 7)]
CAUSAL_UNTIL = torch.arange(1, TOKENS + 1).expand(3, -1)
"""Hides what the causal mask hides."""
SEEN = [(True, None, None), (False, None, None), (True, 6, None), (False, 6, None), (False, None, CAUSAL_UNTIL)]
KINDS = ["student_teacher", "teacher_student", "score_mse"]


def make(seed, *, heads=8, groups=4, width=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, heads, TOKENS, width, dtype=torch.float64, generator=generator).to(dtype)
    key = torch.randn(3, groups, TOKENS, width, dtype=torch.float64, generator=generator).to(dtype)
    return AttentionInputs(query.requires_grad_(), key.requires_grad_(), 0.6)


def outcome(functions, kind, student, teacher, mask):
    """The value and the gradients of queries and keys, of the function for scores or that for distributions."""
    of_scores, of_shares = functions
    if kind == "score_mse":
        loss = of_scores(student, teacher, mask)
    else:
        loss = of_shares(student, teacher, mask, direction=kind)
    return loss.sum.detach(), *torch.autograd.grad(loss.sum, [student.query, student.key])


plain = partial(outcome, (attention_score_mse_plain, attention_kl_plain))
fused = partial(outcome, (attention_score_mse, attention_kl))


def spoiled(inputs: AttentionInputs, mask: Tensor) -> AttentionInputs:
    """With padding that holds anything, and must not matter."""
    real = mask.bool()[:, None, :, None]
    query, key = torch.where(real, inputs.query, torch.nan), torch.where(real, inputs.key, torch.inf)
    return AttentionInputs(query, key, inputs.scaling)


def error(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("causal", "window", "visible_until"), SEEN)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_cut_into_blocks_gives_the_plain_loss_and_gradient(mask, causal, window, visible_until, kind) -> None:
    student, teacher = make(0), make(1, groups=2, width=9)
    expected = plain(kind, student, teacher, AttentionMask(mask, causal or visible_until is not None, window))
    if visible_until is not None:
        visible_until = visible_until.masked_fill(mask == 0, TOKENS)  # padding may see all, which must not matter
    visible = AttentionMask(mask, causal, window, visible_until)
    given = spoiled(student, mask), spoiled(teacher, mask)
    with torch.no_grad():
        for shape in [None, *SHAPES]:
            result = block_loss(kind, *given, visible, {"query", "key"}, shape=shape)
            for got, wanted in zip(result, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_precision_of_the_gradients(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    student, teacher = make(0, dtype=dtype), make(1, dtype=dtype)
    exact = [AttentionInputs(x.query.double(), x.key.double(), x.scaling) for x in (student, teacher)]
    got = fused(kind, student, teacher, AttentionMask(MASKS["packed"], causal=True))
    expected = plain(kind, *exact, AttentionMask(MASKS["packed"], causal=True))
    assert got[0].dtype == torch.float32
    assert [gradient.dtype for gradient in got[1:]] == [dtype, dtype]
    assert error(got[0], expected[0]) < 1e-5
    assert max(error(*pair) for pair in zip(got[1:], expected[1:], strict=True)) < tolerance


@pytest.mark.parametrize(("causal", "relation_heads"), [(True, 4), (False, 8), (True, 12)])
@pytest.mark.parametrize("kind", ["query-query", "query-key", "key-query"])
def test_relations(kind: str, causal: bool, relation_heads: int) -> None:
    """Their gradients; tests/unit/methods compares the values with loops over queries and keys."""
    student, teacher = make(0), make(1, groups=2, width=12)

    def sides(inputs: AttentionInputs) -> RelationInputs:
        return RelationInputs(*(getattr(inputs, side) for side in kind.split("-")))

    results = []
    mask = AttentionMask(MASKS["packed"], causal=causal)
    for function in (relation_kl, relation_kl_plain):
        loss = function(sides(student), sides(teacher), mask, relation_heads=relation_heads).sum
        results.append((loss.detach(), *torch.autograd.grad(loss, list(dict.fromkeys(sides(student))))))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_no_matrix_of_all_scores(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CPU_BUDGET", 2**11)
    query, key, *others = torch.randn(4, 1, 4, 512, 8)
    student, teacher = AttentionInputs(query.requires_grad_(), key.requires_grad_(), 1.0), AttentionInputs(*others, 1.0)
    mask, kept = torch.ones(1, 512, dtype=torch.long), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()), lambda x: x):
        seen = shapes_of_results(lambda: attention_kl(student, teacher, AttentionMask(mask, causal=causal)))
    assert max(math.prod(shape) for _, shape in seen) <= 2 * 64 * 512
    assert kept == [query.numel(), key.numel()]


def test_only_what_asks_for_a_gradient_gets_one() -> None:
    student, teacher = make(0), make(1)
    expected = fused("student_teacher", student, teacher, AttentionMask(MASKS["padded"], causal=True))
    for fixed, other in (("query", "key"), ("key", "query")):
        half = student._replace(**{fixed: getattr(student, fixed).detach()})
        loss = attention_kl(half, teacher, AttentionMask(MASKS["padded"], causal=True)).sum
        (gradient,) = torch.autograd.grad(loss, getattr(half, other))
        assert torch.equal(gradient, expected[1 if other == "query" else 2])


def test_gradient_scales_with_what_comes_in_and_may_be_asked_for_twice() -> None:
    student, teacher = make(0), make(1)
    loss = attention_kl(student, teacher, AttentionMask(MASKS["full"], causal=True)).sum
    (one,) = torch.autograd.grad(loss, student.query, retain_graph=True)
    (two,) = torch.autograd.grad(3 * loss, student.query, retain_graph=True)
    torch.testing.assert_close(two, 3 * one)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, student.query, create_graph=True)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_scores_far_apart(kind: str) -> None:
    """Shares that underflow, in either model."""
    student, teacher = (AttentionInputs(x.query.detach() * 40, x.key.detach(), 1.0) for x in (make(0), make(1)))
    for x in student[:2]:
        x.requires_grad_()
    got = fused(kind, student, teacher, AttentionMask(MASKS["padded"], causal=True))
    for one, other in zip(got, plain(kind, student, teacher, AttentionMask(MASKS["padded"], causal=True)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
