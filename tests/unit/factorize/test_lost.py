"""What compress says of the matrices, against the singular values that a rank leaves out."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llmdistill.config import FactorizeConfig
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.lost import as_lines, lost_by_kind

SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)),
        GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2)),
    ],
    ids=["llama", "gpt2"],
)
def test_the_loss_of_a_kind_is_what_the_singular_values_beyond_the_rank_hold(model):
    student = compress_model(copy.deepcopy(model), FactorizeConfig(ranks={"*": 3}))
    names = list(student.config.quantization_config.modules)
    found = lost_by_kind(model, student)
    assert found.keys() == {name.rsplit(".", 1)[-1] for name in names}
    for kind, each in found.items():
        weights = [model.base_model.get_submodule(name).weight.detach() for name in names if name.endswith(f".{kind}")]
        values = [torch.linalg.svdvals(weight.double()).square() for weight in weights]
        expected = (sum(v[3:].sum() for v in values) / sum(v.sum() for v in values)).sqrt()
        assert each["matrices"] == len(weights)
        assert each["lost"] == pytest.approx(float(expected), rel=1e-4)
    lines = as_lines(found).splitlines()
    assert len(lines) == 1 + len(found)
    most = max(found, key=lambda kind: found[kind]["lost"])
    assert lines[1].split()[0] == most
    assert lines[1].endswith(f"{found[most]['lost']:.1%} of their norm")
