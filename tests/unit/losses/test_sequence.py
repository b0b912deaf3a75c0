import math
from functools import partial

import pytest
import torch
from torch import Tensor

from llmdistill.batch import IGNORE_INDEX
from llmdistill.losses import sequence
from llmdistill.losses.divergence import forward_kl, reverse_kl

CLASSES = torch.tensor([2, IGNORE_INDEX, 0, 1])
SCORES = torch.tensor([1.5, math.nan, 0.0, 4.2], dtype=torch.float64)
HAS_TARGET = torch.tensor([True, False, True, True])


def make(seed: int, classes: int = 3) -> Tensor:
    return 2 * torch.randn(4, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOSSES = {
    "cross-entropy": (lambda s, t, has: sequence.sequence_cross_entropy(s, CLASSES.where(has, IGNORE_INDEX)), 3),
    "mse": (lambda s, t, has: sequence.sequence_mse(s, SCORES.where(has, math.nan)), 1),
    "divergence": (partial(sequence.sequence_divergence, divergence=reverse_kl, temperature=1.7), 3),
    "soft cross-entropy": (partial(sequence.sequence_soft_cross_entropy, temperature=1.7), 3),
    "score mse": (sequence.sequence_score_mse, 1),
    "embedding cosine": (sequence.sequence_embedding_cosine, 3),
    "embedding mse": (sequence.sequence_embedding_mse, 3),
}
every_loss = pytest.mark.parametrize(("loss_of", "classes"), LOSSES.values(), ids=LOSSES)


SPANS = torch.tensor([[1, 3], [IGNORE_INDEX] * 2, [0, 0], [2, 4]])
REAL = torch.tensor([4, 5, 1, 5])
"""The real tokens of each sequence of five; the others are padding."""


def make_spans(seed: int, padding: float = -math.inf) -> Tensor:
    logits = 2 * torch.randn(4, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    is_padding = torch.arange(5)[None] >= REAL[:, None]
    return logits.masked_fill(is_padding[:, None], padding)


@every_loss
def test_sequences_without_target_do_not_matter(loss_of, classes: int) -> None:
    results = []
    plain = [(garbage, torch.float64, HAS_TARGET) for garbage in (0.0, math.nan, math.inf)]
    half, none = (0.0, torch.bfloat16, HAS_TARGET), (0.0, torch.float64, torch.zeros(4, dtype=torch.bool))
    for garbage, dtype, has in (*plain, half, none):
        student, teacher = make(0, classes).bfloat16().to(dtype), make(1, classes).bfloat16().to(dtype)
        student[1] = teacher[1] = garbage
        student.requires_grad_()
        loss = loss_of(student, teacher, has)
        loss.sum.backward()
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
        soft = sequence.sequence_divergence(logits, teacher, HAS_TARGET, divergence=forward_kl, temperature=1.7)
        return sequence.sequence_cross_entropy(logits, SPANS).sum + soft.sum

    raw = make_spans(0, padding=math.nan).requires_grad_()
    losses(raw).backward()
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
    found = sequence.sequence_margin_mse(student, teacher, place)
    expected = torch.zeros(())
    for query in (1, 4):
        margins = [each[query] @ each[query + 1] - each[query] @ each[query + 2] for each in (student, teacher)]
        expected = expected + (margins[0] - margins[1]) ** 2
    assert float(found.count) == 7
    # By the count of the sentences, of which a triple has three, it is the mean over the triples.
    torch.testing.assert_close(found.sum / 6, expected / 2)
    (gradient,) = torch.autograd.grad(found.sum / 6, student, retain_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected / 2, student)[0])
