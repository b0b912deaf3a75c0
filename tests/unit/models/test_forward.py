from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmdistill.batch import Batch
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder


def test_logits_of_padding_rows_are_left_out() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = Batch(ids, torch.ones_like(ids), ids)
    recorder = Recorder(model, {})
    whole = TappedModel(model, recorder)(batch).logits
    assert whole.shape == (2, 3, 10)
    assert torch.equal(TappedModel(model, recorder, vocabulary=7)(batch).logits, whole[..., :7])
