from __future__ import annotations

import torch
from references import terms_of
from torch.nn import functional
from transformers import BertConfig, LlamaConfig

from llmdistill.batch import Batch, Outputs, Taps
from llmdistill.methods import METHODS
from llmdistill.methods.makd import MakdConfig
from llmdistill.methods.sft import make_sft

LABELS = torch.tensor([[-100, 2, 3], [-100, -100, 1]])
LOGITS = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
BATCH = Batch(LABELS.clamp_min(0), torch.ones_like(LABELS), LABELS)


def test_it_is_the_cross_entropy_of_the_labels() -> None:
    method = make_sft()
    assert not method.needs_teacher
    assert not method.student_taps
    assert not method.teacher_taps
    terms = terms_of(method, Outputs(LOGITS, Taps()), None, BATCH)
    assert terms.keys() == method.weights.keys() == {"label"}
    expected = functional.cross_entropy(LOGITS[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten())
    torch.testing.assert_close(terms["label"].sum / terms["label"].count, expected)


def test_methods_are_built_from_configs() -> None:
    decoder = LlamaConfig(num_hidden_layers=2)
    assert "attention" in METHODS["makd"].build(MakdConfig(), decoder, decoder).weights
    assert METHODS["sft"].build(None, decoder, decoder).weights == {"label": 1.0}
    encoder = BertConfig(num_hidden_layers=2)
    terms = terms_of(METHODS["sft"].build(MakdConfig(), encoder, encoder), Outputs(LOGITS, Taps()), None, BATCH)
    expected = functional.cross_entropy(LOGITS.flatten(0, 1), LABELS.flatten())  # not shifted
    torch.testing.assert_close(terms["label"].sum / terms["label"].count, expected)
