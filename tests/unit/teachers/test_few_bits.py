"""A teacher with weights of few bits: how far its predictions move, and what is refused."""

import copy

import pytest
import torch
from tiny import WORDS, tiny_model

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.config.student import QuantizeConfig
from llmdistill.errors import UserError
from llmdistill.models.quantized import quantize
from llmdistill.teachers.few_bits import check_bits, round_teacher

pytest.importorskip("torchao")


def batch_of():
    ids = torch.randint(5, WORDS, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return Batch(ids, mask, ids.masked_fill((mask == 0) | (torch.arange(9) < 3), IGNORE_INDEX))


@pytest.mark.parametrize(("kind", "bits"), [("llama", "int8"), ("llama", "int4"), ("gemma2", "int8")])
def test_the_divergence_is_that_of_whole_logits(kind, bits, capsys):
    exact, batch = tiny_model(kind, scale=4.0), batch_of()
    rounded, other = copy.deepcopy(exact), copy.deepcopy(exact)
    nats = round_teacher(rounded, "teacher.quantize", bits, batch_of)
    quantize(other, QuantizeConfig(weights=bits, embeddings="exact"))
    with torch.no_grad():
        log_p, log_q = (
            model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.double().log_softmax(-1)
            for model in (exact, other)
        )
    # A position predicts the label after it.
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[:, :-1][batch.labels[:, 1:] != IGNORE_INDEX].mean().item()
    assert kl > 1e-6
    assert nats == pytest.approx(kl, rel=1e-3, abs=1e-7)
    said = capsys.readouterr().out
    assert f"its linears in {bits}" in said
    assert ("take int8" in said) == (bits == "int4" and kl > 1e-2)


def test_only_the_weights_of_the_layers_are_rounded(capsys):
    model = tiny_model("llama", scale=4.0)
    head, mlp = model.lm_head.weight.clone(), model.model.layers[0].mlp.up_proj.weight.detach().clone()
    assert round_teacher(model, "teacher.quantize", "int8", None) is None
    assert torch.equal(model.lm_head.weight, head)
    error = (model.model.layers[0].mlp.up_proj.weight.dequantize() - mlp).abs().max()
    assert 0 < error <= mlp.abs().max() / 127
    assert not hasattr(model.config, "quantization_config")


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(UserError, match=r"teacher\.quantize fp8 needs a GPU that multiplies in fp8"):
        check_bits("teacher.quantize", "fp8", torch.device("cpu"))
    check_bits("teacher.quantize", "int8", torch.device("cpu"))
    model = tiny_model("llama")
    quantize(model, QuantizeConfig(weights="int8"))
    with pytest.raises(UserError, match="int8 weights already"):
        round_teacher(model, "teacher.quantize", "int4", None)
