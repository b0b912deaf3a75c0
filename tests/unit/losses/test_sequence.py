from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from llmdistill.batch import IGNORE_INDEX, LossSum
from llmdistill.losses.divergence import forward_kl, reverse_kl
from llmdistill.losses.sequence import (
    sequence_cross_entropy,
    sequence_divergence,
    sequence_embedding_cosine,
    sequence_embedding_mse,
    sequence_margin_mse,
    sequence_mse,
    sequence_score_mse,
    sequence_soft_cross_entropy,
)

CLASSES = torch.tensor([2, IGNORE_INDEX, 0, 1])
SCORES = torch.tensor([1.5, math.nan, 0.0, 4.2], dtype=torch.float64)
HAS_TARGET = torch.tensor([True, False, True, True])
COUNTED = [0, 2, 3]


def make(seed: int, classes: int = 3) -> Tensor:
    return 2 * torch.randn(4, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def probabilities(row: Tensor, temperature: float = 1.0) -> list[float]:
    weights = [math.exp(float(x) / temperature) for x in row]
    return [weight / sum(weights) for weight in weights]


LOSSES = {
    "cross-entropy": (lambda s, t: sequence_cross_entropy(s, CLASSES), 3),
    "mse": (lambda s, t: sequence_mse(s, SCORES), 1),
    "divergence": (lambda s, t: sequence_divergence(s, t, HAS_TARGET, divergence=reverse_kl, temperature=1.7), 3),
    "soft cross-entropy": (lambda s, t: sequence_soft_cross_entropy(s, t, HAS_TARGET, temperature=1.7), 3),
    "score mse": (lambda s, t: sequence_score_mse(s, t, HAS_TARGET), 1),
    "embedding cosine": (lambda s, t: sequence_embedding_cosine(s, t, HAS_TARGET), 3),
    "embedding mse": (lambda s, t: sequence_embedding_mse(s, t, HAS_TARGET), 3),
}
every_loss = pytest.mark.parametrize(("loss_of", "classes"), LOSSES.values(), ids=LOSSES)


def check(loss: LossSum, expected: float) -> None:
    assert loss.sum.item() == pytest.approx(expected, rel=1e-12)
    assert loss.count.item() == 3


def test_targets() -> None:
    logits = make(0)
    check(
        sequence_cross_entropy(logits, CLASSES), -sum(math.log(probabilities(logits[b])[CLASSES[b]]) for b in COUNTED)
    )
    scores = make(0, classes=1)
    check(sequence_mse(scores, SCORES), sum((float(scores[b, 0]) - float(SCORES[b])) ** 2 for b in COUNTED))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_teacher(temperature: float) -> None:
    student, teacher = make(0), make(1)
    soft = divergence = 0.0
    for b in COUNTED:
        p, q = probabilities(teacher[b], temperature), probabilities(student[b], temperature)
        soft -= sum(x * math.log(y) for x, y in zip(p, q, strict=True))
        divergence += temperature**2 * sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    check(sequence_soft_cross_entropy(student, teacher, HAS_TARGET, temperature=temperature), soft)
    check(sequence_divergence(student, teacher, HAS_TARGET, divergence=forward_kl, temperature=temperature), divergence)
    student, teacher = make(0, classes=1), make(1, classes=1)
    check(
        sequence_score_mse(student, teacher, HAS_TARGET),
        sum((float(student[b, 0]) - float(teacher[b, 0])) ** 2 for b in COUNTED),
    )


def test_embeddings() -> None:
    student, teacher = make(0), make(1)
    cosine = squares = 0.0
    for b in COUNTED:
        ours, theirs = student[b].tolist(), teacher[b].tolist()
        dot = sum(x * y for x, y in zip(ours, theirs, strict=True))
        cosine += 1 - dot / math.hypot(*ours) / math.hypot(*theirs)
        squares += sum((x - y) ** 2 for x, y in zip(ours, theirs, strict=True)) / len(ours)
    check(sequence_embedding_cosine(student, teacher, HAS_TARGET), cosine)
    check(sequence_embedding_mse(student, teacher, HAS_TARGET), squares)


@every_loss
def test_sequences_without_target_do_not_matter(loss_of, classes: int) -> None:
    results = []
    for garbage in (0.0, math.nan, math.inf):
        student, teacher = make(0, classes), make(1, classes)
        student[1] = teacher[1] = garbage
        student.requires_grad_()
        loss = loss_of(student, teacher)
        loss.sum.backward()
        assert student.grad is not None
        results.append((loss.sum.detach(), student.grad))
    for value, gradient in results[1:]:
        assert torch.equal(value, results[0][0])
        assert torch.equal(gradient, results[0][1])
        assert not gradient[1].any()


@every_loss
def test_gradient(loss_of, classes: int) -> None:
    teacher = make(1, classes)
    torch.autograd.gradcheck(lambda student: loss_of(student, teacher).sum, make(0, classes).requires_grad_())


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_fp32(loss_of, classes: int, dtype: torch.dtype) -> None:
    student, teacher = make(0, classes).to(dtype), make(1, classes).to(dtype)
    loss = loss_of(student, teacher)
    assert loss.sum.dtype in (torch.float32, torch.float64)  # the scores here are fp64
    assert loss.sum.item() == pytest.approx(loss_of(student.double(), teacher.double()).sum.item(), rel=1e-5)


def test_without_any_target_the_loss_is_zero_and_has_a_gradient() -> None:
    none = torch.zeros(4, dtype=torch.bool)
    for loss_of, classes in (
        (lambda s: sequence_cross_entropy(s, torch.full((4,), IGNORE_INDEX)), 3),
        (lambda s: sequence_mse(s, torch.full((4,), math.nan)), 1),
        (lambda s: sequence_divergence(s, make(1), none, divergence=forward_kl), 3),
        (lambda s: sequence_soft_cross_entropy(s, make(1), none), 3),
        (lambda s: sequence_score_mse(s, make(1, 1), none), 1),
        (lambda s: sequence_embedding_cosine(s, make(1), none), 3),
        (lambda s: sequence_embedding_mse(s, make(1), none), 3),
    ):
        student = make(0, classes).requires_grad_()
        loss = loss_of(student)
        loss.sum.backward()
        assert loss.sum.item() == loss.count.item() == 0
        assert student.grad is not None
        assert not student.grad.any()


SPANS = torch.tensor([[1, 3], [IGNORE_INDEX] * 2, [0, 0], [2, 4]])
REAL = torch.tensor([4, 5, 1, 5])
"""The real tokens of each sequence of five; the others are padding."""


def make_spans(seed: int, padding: float = -math.inf) -> Tensor:
    logits = 2 * torch.randn(4, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    is_padding = torch.arange(5)[None] >= REAL[:, None]
    return logits.masked_fill(is_padding[:, None], padding)


def test_a_span_is_the_mean_of_start_and_end() -> None:
    logits = make_spans(0)
    expected = sum(
        -math.log(probabilities(logits[b, end, : REAL[b]])[SPANS[b, end]]) / 2 for b in COUNTED for end in (0, 1)
    )
    check(sequence_cross_entropy(logits, SPANS), expected)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_teacher_s_spans(temperature: float) -> None:
    student, teacher = make_spans(0), make_spans(1)
    kl = cross = 0.0
    for b in COUNTED:
        for end in (0, 1):
            q, p = (probabilities(each[b, end, : REAL[b]], temperature) for each in (student, teacher))
            kl += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / 2
            cross -= sum(x * math.log(y) for x, y in zip(p, q, strict=True)) / 2
    found = sequence_divergence(student, teacher, HAS_TARGET, divergence=forward_kl, temperature=temperature)
    check(found, temperature**2 * kl)
    check(sequence_soft_cross_entropy(student, teacher, HAS_TARGET, temperature=temperature), cross)
    same = sequence_divergence(student, student, HAS_TARGET, divergence=forward_kl, temperature=temperature)
    assert same.sum.item() == pytest.approx(0, abs=1e-12)


def test_spans_have_gradients_at_real_tokens_alone() -> None:
    is_padding = torch.arange(5)[None] >= REAL[:, None]
    teacher = make_spans(1)

    def losses(raw: Tensor) -> Tensor:
        logits = raw.masked_fill(is_padding[:, None], -math.inf)
        soft = sequence_divergence(logits, teacher, HAS_TARGET, divergence=forward_kl, temperature=1.7)
        return sequence_cross_entropy(logits, SPANS).sum + soft.sum

    raw = make_spans(0, padding=math.nan).requires_grad_()
    losses(raw).backward()
    assert raw.grad is not None
    assert (raw.grad[~HAS_TARGET] == 0).all()
    assert (raw.grad.transpose(1, 2)[is_padding] == 0).all()
    assert torch.autograd.gradcheck(losses, make_spans(0, padding=0.0).requires_grad_())


def test_margins_are_those_of_a_loop_over_the_triples() -> None:
    torch.manual_seed(3)
    # A sentence alone, two triples, and padding of a batch that does not count.
    place = torch.tensor([0, 0, 1, 2, 0, 1, 2, IGNORE_INDEX])
    student, teacher = torch.randn(8, 5, requires_grad=True), torch.randn(8, 7)
    found = sequence_margin_mse(student, teacher, place)
    expected = torch.zeros(())
    for query in (1, 4):
        margins = [each[query] @ each[query + 1] - each[query] @ each[query + 2] for each in (student, teacher)]
        expected = expected + (margins[0] - margins[1]) ** 2
    assert float(found.count) == 7
    # By the count of the sentences, of which a triple has three, it is the mean over the triples.
    torch.testing.assert_close(found.sum / 6, expected / 2)
    (gradient,) = torch.autograd.grad(found.sum / 6, student, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected / 2, student)[0])
    assert sequence_margin_mse(student, student, place).sum == 0


def test_margins_of_sentences_without_triples_are_zero_even_where_nothing_is_known() -> None:
    embeddings = torch.full((3, 4), float("nan"))
    assert sequence_margin_mse(embeddings, embeddings, torch.tensor([0, 0, IGNORE_INDEX])).sum == 0
