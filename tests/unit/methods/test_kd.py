from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from references import terms_of
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from llmdistill.batch import Batch, Outputs, Taps
from llmdistill.methods.kd import KdConfig, build_kd

LABELS = torch.tensor([[-100, 2, 3], [-100, -100, 1]])
BATCH = Batch(LABELS.clamp_min(0), torch.ones_like(LABELS), LABELS)
STUDENT, TEACHER = (
    Outputs(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed)), Taps()) for seed in (0, 1)
)
DECODER = LlamaConfig(num_hidden_layers=2)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum(-1)


DIVERGENCES = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": lambda p, q: 0.3 * kl(p, 0.3 * p + 0.7 * q) + 0.7 * kl(q, 0.3 * p + 0.7 * q),
    "skew_forward_kl": lambda p, q: kl(p, 0.2 * p + 0.8 * q),
    "skew_reverse_kl": lambda p, q: kl(q, 0.2 * q + 0.8 * p),
    "tvd": lambda p, q: (p - q).abs().sum(-1) / 2,
}
"""Of the teacher's p and the student's q."""


@pytest.mark.parametrize("name", DIVERGENCES)
def test_terms_are_the_divergence_and_the_labels(name: str) -> None:
    method = build_kd(KdConfig(divergence=name, beta=0.3, alpha=0.2, ratio=0.3), DECODER, DECODER)
    assert method.weights == {name: 0.3, "label": 0.7}
    terms = terms_of(method, STUDENT, TEACHER, BATCH)
    rows = [(0, 0), (0, 1), (1, 1)]
    student, teacher = (torch.stack([each.logits[row] for row in rows]) for each in (STUDENT, TEACHER))
    divergence = DIVERGENCES[name](teacher.softmax(-1), student.softmax(-1)).mean()
    torch.testing.assert_close(terms[name].sum / terms[name].count, divergence)
    labels = functional.cross_entropy(student, torch.tensor([2, 3, 1]))
    torch.testing.assert_close(terms["label"].sum / terms["label"].count, labels)


def test_the_whole_weight_on_the_teacher_leaves_no_labels() -> None:
    method = build_kd(KdConfig(ratio=1.0), DECODER, DECODER)
    assert method.weights == {"forward_kl": 1.0}
    assert terms_of(method, STUDENT, TEACHER, BATCH).keys() == {"forward_kl"}


def test_the_students_own_answers_are_no_labels() -> None:
    own = replace(BATCH, own_answers=True)
    assert own.to("cpu").own_answers
    method = build_kd(KdConfig(), DECODER, DECODER)
    given, written = terms_of(method, STUDENT, TEACHER, BATCH), terms_of(method, STUDENT, TEACHER, own)
    assert written.keys() == {"forward_kl"}
    torch.testing.assert_close(written["forward_kl"].sum, given["forward_kl"].sum)
