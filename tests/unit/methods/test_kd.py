from __future__ import annotations

from dataclasses import replace

import torch
from references import terms_of
from transformers import LlamaConfig

from llmdistill.batch import Batch, Outputs, Taps
from llmdistill.methods.kd import KdConfig, build_kd

LABELS = torch.tensor([[-100, 2, 3], [-100, -100, 1]])
BATCH = Batch(LABELS.clamp_min(0), torch.ones_like(LABELS), LABELS)
STUDENT, TEACHER = (
    Outputs(torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(seed)), Taps()) for seed in (0, 1)
)
DECODER = LlamaConfig(num_hidden_layers=2)


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
