from __future__ import annotations

import math
from collections.abc import Callable

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
    "cross-entropy": (lambda s, t, has: sequence_cross_entropy(s, CLASSES.where(has, IGNORE_INDEX)), 3),
    "mse": (lambda s, t, has: sequence_mse(s, SCORES.where(has, math.nan)), 1),
    "divergence": (lambda s, t, has: sequence_divergence(s, t, has, divergence=reverse_kl, temperature=1.7), 3),
    "soft cross-entropy": (lambda s, t, has: sequence_soft_cross_entropy(s, t, has, temperature=1.7), 3),
    "score mse": (sequence_score_mse, 1),
    "embedding cosine": (sequence_embedding_cosine, 3),
    "embedding mse": (sequence_embedding_mse, 3),
}
every_loss = pytest.mark.parametrize(("loss_of", "classes"), LOSSES.values(), ids=LOSSES)


def check(loss: LossSum, expected: float) -> None:
    assert loss.sum.item() == pytest.approx(expected, rel=1e-12)
    assert loss.count.item() == 3


SPANS = torch.tensor([[1, 3], [IGNORE_INDEX] * 2, [0, 0], [2, 4]])
REAL = torch.tensor([4, 5, 1, 5])
"""The real tokens of each sequence of five; the others are padding."""


def make_spans(seed: int, padding: float = -math.inf) -> Tensor:
    logits = 2 * torch.randn(4, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    is_padding = torch.arange(5)[None] >= REAL[:, None]
    return logits.masked_fill(is_padding[:, None], padding)


def distributions(logits: Tensor, b: int, temperature: float = 1.0) -> list[list[float]]:
    """Of one sequence: over its classes, or over its real tokens for the start and the end of a span."""
    rows = [logits[b]] if logits.dim() == 2 else [row[: REAL[b]] for row in logits[b]]
    return [probabilities(row, temperature) for row in rows]


@pytest.mark.parametrize(("logits", "targets"), [(make(0), CLASSES), (make_spans(0), SPANS)], ids=["classes", "spans"])
def test_targets(logits: Tensor, targets: Tensor) -> None:
    expected = 0.0
    for b in COUNTED:
        shares = distributions(logits, b)
        chosen = targets[b].view(-1).tolist()
        expected -= sum(math.log(p[y]) for p, y in zip(shares, chosen, strict=True)) / len(shares)
    check(sequence_cross_entropy(logits, targets), expected)


def test_scores() -> None:
    student, teacher = make(0, classes=1), make(1, classes=1)
    check(sequence_mse(student, SCORES), sum((float(student[b, 0]) - float(SCORES[b])) ** 2 for b in COUNTED))
    expected = sum((float(student[b, 0]) - float(teacher[b, 0])) ** 2 for b in COUNTED)
    check(sequence_score_mse(student, teacher, HAS_TARGET), expected)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("logits", [make, make_spans], ids=["classes", "spans"])
def test_the_teacher(logits: Callable[[int], Tensor], temperature: float) -> None:
    student, teacher = logits(0), logits(1)
    soft = kl = 0.0
    for b in COUNTED:
        pairs = list(zip(*(distributions(each, b, temperature) for each in (teacher, student)), strict=True))
        for p, q in pairs:
            soft -= sum(x * math.log(y) for x, y in zip(p, q, strict=True)) / len(pairs)
            kl += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / len(pairs)
    check(sequence_soft_cross_entropy(student, teacher, HAS_TARGET, temperature=temperature), soft)
    found = sequence_divergence(student, teacher, HAS_TARGET, divergence=forward_kl, temperature=temperature)
    check(found, temperature**2 * kl)


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
    for garbage, dtype, has in (
        (0.0, torch.float64, HAS_TARGET),
        (math.nan, torch.float64, HAS_TARGET),
        (math.inf, torch.float64, HAS_TARGET),
        (0.0, torch.bfloat16, HAS_TARGET),
        (0.0, torch.float64, torch.zeros(4, dtype=torch.bool)),
    ):
        student, teacher = make(0, classes).bfloat16().to(dtype), make(1, classes).bfloat16().to(dtype)
        student[1] = teacher[1] = garbage
        student.requires_grad_()
        loss = loss_of(student, teacher, has)
        loss.sum.backward()
        assert student.grad is not None
        assert not student.grad[~has].any()
        results.append((loss.sum.detach(), student.grad))
    for value, gradient in results[1:3]:
        assert torch.equal(value, results[0][0])
        assert torch.equal(gradient, results[0][1])
    assert results[3][0].item() == pytest.approx(results[0][0].item(), rel=1e-5), "half types are computed in fp32"
    assert results[4][0].item() == loss.count.item() == 0


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
    student, teacher = torch.randn(8, 5), torch.randn(8, 7)
    student[[0, 7]] = torch.nan  # nothing is known of them
    student.requires_grad_()
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
