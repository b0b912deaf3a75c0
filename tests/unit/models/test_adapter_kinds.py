"""Adapters of every kind that peft merges: the merged model has the logits of peft's own, also saved and loaded."""

import copy
import json
import os
from unittest.mock import patch

import pytest
import torch
from peft import (
    BOFTConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    VeraConfig,
    get_peft_model,
)
from tiny import outputs, tiny_model
from transformers import AutoModelForCausalLM

from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model, merge_adapter


def lora(*targets, **settings):
    return LoraConfig(r=4, lora_alpha=8, target_modules=list(targets) or ["q_proj", "up_proj"], **settings)


EMBEDDING, HEAD = "embed_tokens", "lm_head"
KINDS = {
    "embedding": lora("q_proj", EMBEDDING),
    "head": lora("q_proj", HEAD),
    "embedding and head": lora(EMBEDDING, HEAD),
    "whole head": lora(modules_to_save=[HEAD]),
    "whole embedding and norm": lora(modules_to_save=[EMBEDDING, "norm"]),
    "some tokens": lora(trainable_token_indices=[3, 4, 7]),
    "rank-stabilized": lora(use_rslora=True),
    "DoRA of the embedding": lora("q_proj", EMBEDDING, use_dora=True),
    "ranks by pattern": lora(rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 3}),
    "biases": lora(bias="all", layers_to_transform=[1]),
    "LoHa": LoHaConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "LoKr": LoKrConfig(r=4, target_modules=["q_proj", "down_proj"]),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": VeraConfig(r=4, target_modules=["q_proj"]),
    "OFT": OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"]),
    "BOFT": BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
}
UNTYING = {"embedding", "head", "embedding and head", "whole head", "whole embedding and norm", "DoRA of the embedding"}
"""The kinds that change an embedding or a head that were one, each by itself."""
RESIZED = {
    "whole": lora(modules_to_save=[EMBEDDING, HEAD]),
    "adapted": lora("q_proj", EMBEDDING),
}


@pytest.fixture(autouse=True)
def _environment():
    """Without CUDA, peft's BOFT leaves the environment with another compiler."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def save(tmp_path):
    """Save a base and an adapter as training leaves it; returns the adapter's folder, and the outputs of peft."""

    def save(config, *, tied=False, rows=None):
        tiny_model("llama", scale=3.0, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")

        def base():
            model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            if rows is not None:
                model.resize_token_embeddings(rows, mean_resizing=False)
            return model

        model = get_peft_model(base(), copy.deepcopy(config))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(tmp_path / "adapter")
        file = tmp_path / "adapter" / "adapter_config.json"
        content = json.loads(file.read_text())
        file.write_text(json.dumps({**content, "base_model_name_or_path": "../base"}))
        expected = outputs(PeftModel.from_pretrained(base(), tmp_path / "adapter").eval())
        change = (outputs(base())[..., :60] - expected[..., :60]).abs().max()
        assert change > 0.01, "the adapter changes nothing"
        return tmp_path / "adapter", expected

    return save


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_peft(save, tmp_path, kind, tied):
    adapter, expected = save(KINDS[kind], tied=tied)
    os.environ["CXX"] = "c++"
    torch.testing.assert_close(outputs(load_model(adapter, dtype=torch.float32)), expected, rtol=1e-4, atol=1e-5)
    assert os.environ["CXX"] == "c++"
    merge_adapter(adapter, tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(outputs(stock), expected, rtol=1e-4, atol=1e-5)
    head, table = stock.get_output_embeddings().weight, stock.get_input_embeddings().weight
    is_one = tied and kind not in UNTYING
    assert ((head is table), stock.config.tie_word_embeddings) == (is_one, is_one)
    assert load_config(adapter).tie_word_embeddings == is_one


@pytest.mark.parametrize(("kind", "tied"), [("whole", False), ("whole", True), ("adapted", True)])
def test_embeddings_that_were_resized_come_from_the_adapter(save, kind, tied):
    adapter, expected = save(RESIZED[kind], tied=tied, rows=64)
    assert load_config(adapter).vocab_size == 64
    loaded = load_model(adapter, dtype=torch.float32)
    assert loaded.config.vocab_size == 64
    assert load_config(adapter).tie_word_embeddings == loaded.config.tie_word_embeddings
    torch.testing.assert_close(outputs(loaded), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [[], ["q_proj"]], ids=["experts", "experts and linears"])
def test_adapters_of_parameters_that_are_no_linears(targets, tmp_path):
    """The stacked weights of experts, which peft adapts by `target_parameters`."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=targets, target_parameters=stacks))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "adapter")
    expected = outputs(model.eval())
    assert (outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "base")) - expected).abs().max() > 0.01
    found = outputs(load_model(tmp_path / "adapter", dtype=torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_adapters_that_cannot_be_merged(save):
    for config, said in (
        (lora(layer_replication=[[0, 2], [1, 2]]), "layer_replication gives copies of a layer different adapters"),
        (PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "PREFIX_TUNING cannot be merged"),
        (lora(lora_bias=True), "the base layer has no bias"),
    ):
        adapter, _ = save(config)
        with pytest.raises(UserError, match=said) as refused:
            load_model(adapter, dtype=torch.float32)
        assert "\n" not in str(refused.value)
    adapter, _ = save(RESIZED["adapted"], rows=64)
    with pytest.raises(UserError, match="the adapter has 64 rows of embed_tokens alone, and its base has 60: save it"):
        load_model(adapter, dtype=torch.float32)


def test_an_adapter_whose_merged_model_differs_from_peft_is_refused(save, monkeypatch):
    adapter, _ = save(lora())
    monkeypatch.setattr("peft.tuners.lora.Linear.get_delta_weight", lambda self, _: 2 * torch.ones_like(self.weight))
    with pytest.raises(UserError, match=r"cannot be merged into its base: an output differs by .* from peft's model"):
        load_model(adapter, dtype=torch.float32)
