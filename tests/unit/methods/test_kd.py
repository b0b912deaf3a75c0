from __future__ import annotations

import torch
from references import terms_of
from torch.nn import functional
from transformers import LlamaConfig

from llmdistill.batch import Batch, Outputs, Taps
from llmdistill.methods import METHODS
from llmdistill.methods.kd import KdConfig

LABELS = torch.tensor([[-100, 2, 3], [-100, -100, 1]])
BATCH = Batch(LABELS.clamp_min(0), torch.ones_like(LABELS), LABELS)
STUDENT, TEACHER = (
    Outputs(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed)), Taps()) for seed in (0, 1)
)


def build(settings: KdConfig):
    decoder = LlamaConfig(num_hidden_layers=2)
    return METHODS["kd"].build(settings, decoder, decoder)


def test_terms_are_the_divergence_and_the_labels() -> None:
    method = build(KdConfig(ratio=0.3))
    assert method.needs_teacher
    assert method.weights == {"forward_kl": 0.3, "label": 0.7}
    assert set(method.positions.values()) == {"labels"}
    terms = terms_of(method, STUDENT, TEACHER, BATCH)
    assert terms.keys() == method.weights.keys()
    rows = [(0, 0), (0, 1), (1, 1)]
    student, teacher = (torch.stack([each.logits[row] for row in rows]) for each in (STUDENT, TEACHER))
    divergence = functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(terms["forward_kl"].sum / terms["forward_kl"].count, divergence)
    labels = functional.cross_entropy(student, torch.tensor([2, 3, 1]))
    torch.testing.assert_close(terms["label"].sum / terms["label"].count, labels)


def test_the_whole_weight_on_the_teacher_leaves_no_labels() -> None:
    method = build(KdConfig(ratio=1.0, divergence="reverse_kl"))
    assert method.weights == {"reverse_kl": 1.0}
    assert terms_of(method, STUDENT, TEACHER, BATCH).keys() == {"reverse_kl"}


def test_the_students_own_answers_are_no_labels() -> None:
    own = Batch(BATCH.input_ids, BATCH.attention_mask, BATCH.labels, own_answers=True)
    assert own.to("cpu").own_answers
    method = build(KdConfig())
    given, written = terms_of(method, STUDENT, TEACHER, BATCH), terms_of(method, STUDENT, TEACHER, own)
    assert written.keys() == {"forward_kl"}
    torch.testing.assert_close(written["forward_kl"].sum, given["forward_kl"].sum)
