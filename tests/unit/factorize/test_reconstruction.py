"""What compress says of the matrices, against the singular values that a rank leaves out and the merged student."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llmdistill.config import FactorizeConfig
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.export import merge
from llmdistill.factorize.install import matrix
from llmdistill.factorize.reconstruction import as_lines, by_kind

SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
MODELS = {
    "llama": LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=2)),
    "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2)),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_loss_of_a_kind_is_what_the_singular_values_beyond_the_rank_hold(model):
    lost = {}
    student = compress_model(model, FactorizeConfig(ranks={"*": 3}), lost=lost)
    names = list(student.config.quantization_config.modules)
    found = by_kind(lost)
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


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("method", ["pivoted", "kronecker"])
def test_the_loss_is_that_of_the_matrices_which_the_student_has(model, method):
    shaped = {"shapes": {"*": "4x4"}, "sums": 2}
    settings = FactorizeConfig(**(shaped if method == "kronecker" else {"ranks": {"*": 3}, "form": "pivoted"}))
    lost = {}
    # In a dtype that rounds the factors, which the loss must not overlook.
    model = copy.deepcopy(model).bfloat16()
    student = compress_model(model, settings, "kronecker" if method == "kronecker" else "svd", lost=lost)
    merge(student.float())
    assert lost
    for name, (left_out, whole) in lost.items():
        ours, theirs = (matrix(each.base_model.get_submodule(name)).float() for each in (student, model))
        assert left_out == pytest.approx(float((ours - theirs).detach().square().sum()), rel=1e-3)
        assert whole == pytest.approx(float(theirs.detach().square().sum()), rel=1e-3)
