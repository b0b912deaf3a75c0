"""Where there is a GPU the losses hand their work to the Triton kernels; what these get, and what becomes of it."""

import sys
from types import ModuleType

import pytest
import torch

from llmdistill.attention_mask import AttentionMask
from llmdistill.losses import attention, features, fused
from llmdistill.losses.attention import AttentionInputs, attention_kl
from llmdistill.losses.divergence import FORWARD_KL, Divergence, jsd_with_derivative
from llmdistill.losses.features import hidden_mse, matrix_mse
from llmdistill.losses.fused import head_chunk
from llmdistill.losses.fused.blocks import block_loss
from llmdistill.losses.head import HeadInputs, token_losses
from llmdistill.losses.terms import TokenTerm

MASK = torch.tensor([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])


def stand_in(monkeypatch, name, **contents):
    """A module in the place of one that needs Triton."""
    module = ModuleType(f"llmdistill.losses.fused.triton_{name}")
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(fused, f"triton_{name}", module, raising=False)


@pytest.mark.parametrize("same", [False, True])
def test_attention_goes_to_the_kernel(monkeypatch, same: bool) -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 4, 5, 3, requires_grad=True)
    key = query if same else torch.randn(2, 2, 5, 3, requires_grad=True)
    student, teacher = AttentionInputs(query, key, 0.5), AttentionInputs(*torch.randn(2, 2, 4, 5, 6), 0.4)
    leaves = [query] if same else [query, key]
    expected = attention_kl(student, teacher, AttentionMask(MASK, causal=True, window=3))
    gradients = torch.autograd.grad(expected.sum, leaves)
    calls = []

    def attention_loss(kind, ours, theirs, mask, gradients):
        calls.append((kind, mask.causal, mask.window, mask.has_limits, gradients, ours.scaling, theirs.scaling))
        return block_loss(kind, ours, theirs, mask, gradients)

    stand_in(monkeypatch, "attention", attention_loss=attention_loss)
    monkeypatch.setattr(attention, "available", lambda device: True)
    loss = attention_kl(student, teacher, AttentionMask(MASK, causal=True, window=3))
    assert calls == [("student_teacher", True, 3, False, {"query"} if same else {"query", "key"}, 0.5, 0.4)]
    torch.testing.assert_close(loss.sum, expected.sum)
    torch.testing.assert_close(torch.autograd.grad(loss.sum, leaves), gradients)
    with torch.no_grad():
        attention_kl(student, teacher, AttentionMask(MASK, causal=True))
    assert calls[1][2:5] == (None, False, set())


@pytest.mark.parametrize("normalize", [False, True])
def test_features_go_to_the_kernel(monkeypatch, normalize: bool) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, 4, requires_grad=True), torch.randn(2, 3, 5, 4)
    expected = matrix_mse(student, teacher, MASK, normalize=normalize)
    gradient = torch.autograd.grad(expected.sum, student)
    calls = []

    def squared_error(ours, theirs, real_BT, *, min_square, with_gradient):
        calls.append((real_BT.tolist(), min_square, with_gradient))
        return features.squared_error(ours, theirs, real_BT, min_square=min_square, with_gradient=with_gradient)

    stand_in(monkeypatch, "features", squared_error=squared_error)
    monkeypatch.setattr(features, "available", lambda device: True)
    found = matrix_mse(student, teacher, MASK, normalize=normalize)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum, student), gradient)
    matrix_mse(student.detach(), teacher, MASK, normalize=normalize)
    with torch.no_grad():
        matrix_mse(student, teacher, MASK, normalize=normalize)
    floor = features.MIN_SQUARE if normalize else None
    assert calls == [((MASK != 0).tolist(), floor, needed) for needed in (True, False, False)]


def test_fp64_stays_where_it_is_exact(monkeypatch) -> None:
    for module, name in ((attention, "attention"), (head_chunk, "head"), (features, "features")):
        monkeypatch.setattr(module, "available", lambda device: True)
        stand_in(monkeypatch, name)
    inputs = AttentionInputs(*torch.randn(2, 1, 2, 3, 4, dtype=torch.float64), 1.0)
    assert attention_kl(inputs, inputs, AttentionMask(torch.ones(1, 3, dtype=torch.long))).sum == 0
    student = torch.randn(1, 3, 4, dtype=torch.float64)
    assert hidden_mse(student, student.float(), torch.ones(1, 3)).sum > 0
    head = HeadInputs(torch.randn(3, 4, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64), None)
    token_losses(head, head, torch.tensor([0, 1, 2]), [TokenTerm("kl", FORWARD_KL)], torch.ones(1))


def test_words_go_to_the_kernel_unless_it_does_not_know_the_divergence(monkeypatch) -> None:
    torch.manual_seed(0)
    student, teacher = (HeadInputs(torch.randn(5, 4), torch.randn(9, 4), torch.randn(9)) for _ in range(2))
    labels, factors = torch.randint(9, (5,)), torch.tensor([0.3, 0.7])
    terms = [TokenTerm("label", None), TokenTerm("jsd", jsd_with_derivative(0.2), 2.0, 4.0)]
    expected = token_losses(student, teacher, labels, terms, factors)
    seen = []

    def kernel_losses(student_NV, teacher_NV, labels_N, bound, *, scales, with_gradient):
        seen.append((list(bound.terms), scales, with_gradient))
        return expected.sums * len(labels_N) / 5

    stand_in(monkeypatch, "head", kernel_losses=kernel_losses)
    monkeypatch.setattr(head_chunk, "available", lambda device: True)
    torch.testing.assert_close(token_losses(student, teacher, labels, terms, factors), expected)
    assert seen[0] == (terms, (student.scale, teacher.scale), False)
    unknown = [terms[0], TokenTerm("own", Divergence(FORWARD_KL.value, FORWARD_KL.derivative))]
    calls = len(seen)
    token_losses(student, teacher, labels, unknown, factors)
    assert len(seen) == calls
