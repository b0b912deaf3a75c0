"""The average of several teachers, against its definition in NumPy."""

import numpy as np
import pytest
import torch

from llmdistill.batch import HeadInputs, LogitScale
from llmdistill.losses.divergence import FORWARD_KL, REVERSE_KL
from llmdistill.losses.head import token_losses
from llmdistill.losses.several import SeveralHeads
from llmdistill.losses.terms import TokenTerm

N, V, K = 7, 11, 5
WIDTHS, WORDS, WEIGHTS = (3, 4), (V + 2, V), (0.7, 0.3)
"""The first teacher has two rows of padding more than student and second teacher."""
LABELS = torch.arange(N) % V


def head(rows: int, width: int, words: int, seed: int, *, bias: bool = True) -> HeadInputs:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (words, width), (words,))
    parts = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return HeadInputs(parts[0], parts[1], parts[2] if bias else None)


def teachers() -> tuple[HeadInputs, HeadInputs]:
    first, second = head(N, WIDTHS[0], WORDS[0], 1), head(N, WIDTHS[1], WORDS[1], 2, bias=False)
    return first, second._replace(scale=LogitScale(1.5, 2.0))


def probabilities(inputs: HeadInputs) -> np.ndarray:
    """(N, V): at temperature 1, over the tokens that all models have."""
    logits = inputs.rows @ inputs.weight.T + (0 if inputs.bias is None else inputs.bias)
    if inputs.scale.cap is not None:
        logits = inputs.scale.cap * (inputs.scale.factor * logits / inputs.scale.cap).tanh()
    exps = np.exp(logits[:, :V].numpy())
    return exps / exps.sum(1, keepdims=True)


def averaged(kind: str) -> np.ndarray:
    p, q = map(probabilities, teachers())
    is_mixture = kind == "probabilities"
    found = WEIGHTS[0] * p + WEIGHTS[1] * q if is_mixture else p ** WEIGHTS[0] * q ** WEIGHTS[1]
    return found / found.sum(1, keepdims=True)


def by_hand(p_NV: np.ndarray, student: HeadInputs, term: TokenTerm) -> torch.Tensor:
    """The divergence from given probabilities, which the temperature softens, as torch differentiates it."""
    p = torch.from_numpy(p_NV) ** (1 / term.temperature)
    p = p / p.sum(1, keepdim=True)
    q = ((student.rows @ student.weight.T + student.bias) / term.temperature).softmax(1)
    one, other = (p, q) if term.divergence is FORWARD_KL else (q, p)
    return term.scale * (one * (one.log() - other.log())).sum()


TERMS = [
    TokenTerm("kl", FORWARD_KL),
    TokenTerm("kl at 2", FORWARD_KL, 2.0, 4.0),
    TokenTerm("reverse at 1.5", REVERSE_KL, 1.5, 2.25),
]


def check(several: SeveralHeads, p_NV: np.ndarray, term: TokenTerm, chunk: int) -> None:
    student = HeadInputs(*(each.requires_grad_() for each in head(N, K, V, 0).tensors))
    one = torch.ones(1, dtype=torch.float64)
    found = token_losses(student, several, LABELS, [term], one, vocabulary=V, chunk=chunk).total
    totals = found, by_hand(p_NV, student, term)
    mine, plain = ([total.detach(), *torch.autograd.grad(total, student.tensors)] for total in totals)
    torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk", [2, 5])
@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
@pytest.mark.parametrize("kind", ["probabilities", "log_probabilities"])
def test_averages_are_those_of_the_definition(kind, term, chunk):
    check(SeveralHeads(teachers(), WEIGHTS, kind), averaged(kind), term, chunk)


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("own", [[0, 2, 3, 6], [], [0, 1, 2, 3, 4, 5, 6]], ids=["mixed", "second", "first"])
def test_each_position_has_its_own_teacher(own, chunk):
    of_second = [row for row in range(N) if row not in own]
    first, second = teachers()
    p_NV = np.array([probabilities(first if row in own else second)[row] for row in range(N)])
    heads = first._replace(rows=first.rows[own]), second._replace(rows=second.rows[of_second])
    places = tuple(torch.tensor(each, dtype=torch.long) for each in (own, of_second))
    check(SeveralHeads(heads, places=places), p_NV, TERMS[1], chunk)


def test_half_precision_is_averaged_in_single():
    """The mixture of bf16 logits is rounded nowhere: its loss is that of the same numbers in fp64."""
    student = HeadInputs(*(each.float() for each in head(N, K, V, 0).tensors))
    logits = [HeadInputs((one.rows @ one.weight.T).bfloat16(), None, None) for one in teachers()]
    exact = [HeadInputs(each.rows.double(), None, None) for each in logits]
    found, expected = (
        token_losses(student, SeveralHeads(tuple(of), WEIGHTS), LABELS, [TERMS[0]], torch.ones(1), vocabulary=V).total
        for of in (logits, exact)
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_token_that_no_teacher_gives_a_chance_is_no_nan():
    logits = [
        each._replace(rows=(each.rows @ each.weight.T)[:, :V], weight=None, bias=None, scale=LogitScale())
        for each in teachers()
    ]
    for one in logits:
        one.rows[:, 3] = float("-inf")
    for kind in ("probabilities", "log_probabilities"):
        several = SeveralHeads(tuple(logits), WEIGHTS, kind)
        losses = token_losses(head(N, K, V, 0), several, LABELS, [TERMS[0]], torch.ones(1, dtype=torch.float64))
        assert losses.total.isfinite()
