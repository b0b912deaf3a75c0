"""On the meta device the fused losses allocate what they leave on a GPU: gradients, and one chunk of logits."""

import pytest
import torch

from llmdistill import losses
from llmdistill.batch import HeadInputs
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm
from llmdistill.runtime.tracing import Tracer


def meta(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=grad)


MASK = torch.ones(2, 512, dtype=torch.int64, device="meta")


def peak(job, *given):
    """The bytes beside what is given."""
    tracer = Tracer()
    tracer.ignore(given)
    with tracer:
        result = job()
    assert result is not None
    return sum(tracer.take_peak().values())


def test_attention_loss_leaves_two_gradients():
    query, key = meta(2, 4, 512, 16, grad=True), meta(2, 2, 512, 16, grad=True)
    teacher = losses.AttentionInputs(meta(2, 4, 512, 16), meta(2, 2, 512, 16), 0.25)
    student = losses.AttentionInputs(query, key, 0.25)
    found = peak(
        lambda: losses.attention_kl(student, teacher, losses.AttentionMask(MASK, causal=True)),
        query,
        key,
        *teacher[:2],
        MASK,
    )
    gradients = 4 * (query.numel() + key.numel())
    assert gradients <= found < 1.1 * gradients


@pytest.mark.parametrize(("normalize", "grad"), [(False, True), (True, True), (True, False)])
def test_squared_error_leaves_its_gradient(normalize: bool, grad: bool):
    given = meta(2, 4, 512, 16, grad=grad), meta(2, 4, 512, 16), MASK
    found, gradient = peak(lambda: losses.matrix_mse(*given, normalize=normalize), *given), 4 * given[0].numel()
    assert grad * gradient <= found < (grad + 0.1) * gradient


def test_head_loss_needs_one_chunk_of_logits_and_the_gradients():
    words, width, rows, chunk = 5000, 8, 1000, 100
    student, teacher = (
        HeadInputs(meta(rows, width, grad=grad), meta(words, width, grad=grad), None) for grad in (True, False)
    )
    terms = [TokenTerm("kd", losses.FORWARD_KL, 2.0), TokenTerm("label", None)]
    labels, factors = torch.zeros(rows, dtype=torch.int64, device="meta"), meta(2)
    given = [*student[:2], *teacher[:2], labels, factors]
    found = peak(lambda: token_losses(student, teacher, labels, terms, factors, chunk=chunk), *given)
    assert found == pytest.approx(4 * (chunk * words * 3 // 2 + width * (rows + words)), rel=0.1)
