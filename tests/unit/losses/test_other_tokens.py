"""Losses across tokenizers, against the formulas in NumPy, and against plain KD where tokens are the same."""

import math

import numpy as np
import pytest
import torch

from llmdistill.batch import HeadInputs, LogitScale, OtherTokens
from llmdistill.losses.divergence import FORWARD_KL, REVERSE_KL, jsd_with_derivative
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import TokenTerm

from support import shapes_of_results

TAU = 100.0  # of ALM's published settings
N, M, V, V_TEACHER, K, K_TEACHER = 7, 6, 11, 14, 5, 3
LABELS = torch.tensor([3, 4, 0, 2, 9, 1, 5])
TEACHERS_LABELS = torch.tensor([2, 13, 6, 7, 1, 0])
# Rows 0 and 6 are pairs; rows 1 and 2 are a span of the teacher's rows 1, 2 and 3; row 3 is in none; rows 4 and 5 are a
# span of the teacher's row 4.
PAIRS = [0, -1, -1, -1, -1, -1, 5]
STUDENTS_SPANS = [-1, 0, 0, -1, 1, 1, -1]
STARTS = [-1, 1, -1, -1, 4, -1, -1]
TEACHERS_SPANS = [-1, 0, 0, 0, 1, -1]
SCALES = LogitScale(0.5, 1.5), LogitScale(2.0, None)
SHARED = [3, 5, 7, 8], [2, 0, 9, 11]


def heads(*, bias: bool = True) -> tuple[HeadInputs, HeadInputs]:
    torch.manual_seed(0)
    sizes = [(N, V, K), (M, V_TEACHER, K_TEACHER)]
    made = [[torch.randn(*size, dtype=torch.float64) for size in ((n, k), (v, k), (v,))] for n, v, k in sizes]
    student, teacher = (HeadInputs(rows, weight, of_bias if bias else None) for rows, weight, of_bias in made)
    learned = HeadInputs(*(None if each is None else each.requires_grad_() for each in student.tensors))
    # Without a bias both have another function behind the head.
    return (learned, teacher) if bias else (learned._replace(scale=SCALES[0]), teacher._replace(scale=SCALES[1]))


def others(teacher: HeadInputs) -> OtherTokens:
    spans, pairs, student_spans, starts = map(torch.tensor, (TEACHERS_SPANS, PAIRS, STUDENTS_SPANS, STARTS))
    shared = torch.tensor(SHARED[0]), torch.tensor(SHARED[1])
    return OtherTokens(teacher, TEACHERS_LABELS, spans, pairs, student_spans, starts, 2, shared)


def probabilities(head: HeadInputs, temperature: float = 1.0) -> np.ndarray:
    logits = head.scale.factor * (head.rows @ head.weight.T + (0 if head.bias is None else head.bias))
    if head.scale.cap is not None:
        logits = head.scale.cap * (logits / head.scale.cap).tanh()
    exps = np.exp(logits.detach().numpy() / temperature)
    return exps / exps.sum(1, keepdims=True)


def with_rest(p_NV: np.ndarray, shared: list[int]) -> np.ndarray:
    return np.column_stack([p_NV[:, shared], 1 - p_NV[:, shared].sum(1)])


def of_pairs(student: HeadInputs, teacher: HeadInputs, temperature: float, kind: str) -> float:
    rows = [row for row, teacher_row in enumerate(PAIRS) if teacher_row >= 0]
    q = with_rest(probabilities(student, temperature)[rows], SHARED[0])
    p = with_rest(probabilities(teacher, temperature)[[PAIRS[row] for row in rows]], SHARED[1])

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return (a * np.log(a / b)).sum()

    mean = (p + q) / 2
    return {"forward": kl(p, q), "reverse": kl(q, p), "jsd": (kl(p, mean) + kl(q, mean)) / 2}[kind]


def of_spans(student: HeadInputs, teacher: HeadInputs) -> float:
    q, p, total = probabilities(student), probabilities(teacher), 0.0
    for span in range(2):
        ours = math.prod(q[row, LABELS[row]] for row in range(N) if STUDENTS_SPANS[row] == span) ** (1 / TAU)
        theirs = math.prod(p[row, TEACHERS_LABELS[row]] for row in range(M) if TEACHERS_SPANS[row] == span) ** (1 / TAU)
        total += TAU * (theirs * math.log(theirs / ours) + (1 - theirs) * math.log((1 - theirs) / (1 - ours)))
    return total


def of_starts(student: HeadInputs, teacher: HeadInputs) -> float:
    rows = [row for row, teacher_row in enumerate(STARTS) if teacher_row >= 0]
    q = np.zeros((len(rows), V_TEACHER))  # the shorter one, filled up
    q[:, :V] = probabilities(student)[rows]
    p = probabilities(teacher)[[STARTS[row] for row in rows]]
    return np.abs(np.sort(q, 1) - np.sort(p, 1)).sum()


DIVERGENCES = {"forward": FORWARD_KL, "reverse": REVERSE_KL, "jsd": jsd_with_derivative(0.5)}


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("spans", ["alm", "uld"])
@pytest.mark.parametrize("chunk", [2, 4, 100])
def test_values_are_those_of_the_formulas(kind, spans, chunk):
    student, teacher = heads(bias=chunk != 4)
    terms = [TokenTerm("soft", DIVERGENCES[kind], 2.0, 4.0, spans=spans), TokenTerm("label", None)]
    losses = token_losses(student, others(teacher), LABELS, terms, torch.tensor([0.7, 0.2]), chunk=chunk)
    expected = 4 * of_pairs(student, teacher, 2.0, kind)
    expected += (of_spans if spans == "alm" else of_starts)(student, teacher)
    of_labels = -np.log(probabilities(student)[range(N), LABELS]).sum()
    assert losses.sums.tolist() == pytest.approx([expected, of_labels], abs=1e-9)
    assert losses.total.item() == pytest.approx(0.7 * expected + 0.2 * of_labels, rel=1e-6)


@pytest.mark.parametrize(("spans", "bias", "kind"), [("alm", True, "forward"), ("uld", False, "reverse")])
def test_gradients_are_those_of_the_values(spans, bias, kind):
    student, teacher = heads(bias=bias)
    terms = [TokenTerm("soft", DIVERGENCES[kind], 2.0, 4.0, spans=spans), TokenTerm("label", None)]
    factors = torch.tensor([0.7, 0.3], dtype=torch.float64)

    def total() -> torch.Tensor:
        return token_losses(student, others(teacher), LABELS, terms, factors).total

    total().backward()
    for each in (given for given in student.tensors if given is not None):
        expected = torch.zeros_like(each)
        with torch.no_grad():
            for place in np.ndindex(each.shape):
                for step in (1e-6, -1e-6):
                    each[place] += step
                    expected[place] += total() / (2 * step)
                    each[place] -= step
        torch.testing.assert_close(each.grad, expected, rtol=0, atol=1e-7)


def test_with_the_same_tokens_it_is_plain_kd():
    student, _ = heads(bias=False)
    teacher = HeadInputs(student.rows.detach().flip(0), student.weight.detach().flip(0), None)
    everything, none = torch.arange(V), torch.full((N,), -1)
    same = OtherTokens(teacher, LABELS, none, torch.arange(N), none, none, 0, (everything, everything))
    terms = [TokenTerm("soft", DIVERGENCES["jsd"], 1.5, 2.25), TokenTerm("label", None)]
    losses = [token_losses(student, each, LABELS, terms, torch.tensor([0.5, 0.5])) for each in (teacher, same)]
    torch.testing.assert_close(losses[0].sums, losses[1].sums, rtol=0, atol=1e-9)
    plain, other = (torch.autograd.grad(each.total, student[:2]) for each in losses)
    torch.testing.assert_close(plain, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("spans", ["alm", "uld"])
@pytest.mark.parametrize("forbidden", [list(range(1, V)), [0, 1, 2, 4, 6, 9, 10], [int(LABELS[1])]])
def test_forbidden_words_leave_loss_and_gradient_finite(spans, forbidden):
    student, teacher = heads()
    with torch.no_grad():
        student.bias[forbidden] = -math.inf
        teacher.bias[forbidden] = -math.inf
    losses = token_losses(student, others(teacher), LABELS, [TokenTerm("soft", FORWARD_KL, spans=spans)], torch.ones(1))
    losses.total.backward()
    assert losses.sums.isfinite().all()
    assert all(each.grad.isfinite().all() for each in student.tensors if each is not None)


@pytest.mark.parametrize("spans", ["alm", "uld"])
def test_no_more_logits_than_those_of_a_chunk_are_in_memory(spans):
    torch.manual_seed(0)
    rows, words, chunk = 1000, 40, 64
    student = HeadInputs(torch.randn(rows, K, requires_grad=True), torch.randn(words, K), None)
    teacher = HeadInputs(torch.randn(rows, K), torch.randn(words, K), None)
    number, none = torch.arange(rows), torch.full((rows,), -1)
    pairs, labels = torch.where(number % 3 == 0, number, none), number % words
    spans_of_rows, starts = torch.where(pairs < 0, number // 3, none), torch.where(number % 3 == 1, number, none)
    shared = torch.arange(words - 5), torch.arange(5, words)
    compared = OtherTokens(teacher, labels, spans_of_rows, pairs, spans_of_rows, starts, rows // 3 + 1, shared)
    term = TokenTerm("soft", FORWARD_KL, spans=spans)
    ran = shapes_of_results(lambda: token_losses(student, compared, labels, [term], torch.ones(1), chunk=chunk))
    largest = max(shape[0] for _, shape in ran if len(shape) == 2 and shape[1] >= words - 5)
    assert chunk <= largest <= 256
