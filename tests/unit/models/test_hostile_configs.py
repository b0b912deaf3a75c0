"""A config that nobody meant ends in one sentence with the file, the key and the value, before memory is taken."""

import json
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
from pages import ROOT
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from llmdistill.errors import UserError
from llmdistill.models.config_check import check_values
from llmdistill.models.configs import load_config
from llmdistill.models.general import layer_values
from llmdistill.models.load import load_model

sys.path.insert(0, str(ROOT / "scripts" / "torture"))
import configs


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return configs.models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def changed(made, tmp_path):
    """Copies a model with one value of a JSON file changed, given by its dotted key."""

    def change(name, key, value, file="config.json"):
        folder = made[name].with_name(tmp_path.name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made[name], folder)
        content = json.loads((folder / file).read_text())
        path = tuple(key.split("."))
        if path[0] == "quantization_config" and path[1:2] == ("modules",) and len(path) > 2:
            path = (*path[:2], ".".join(path[2:]))
        (folder / file).write_text(json.dumps(configs.replaced(content, path, value)))
        return folder

    return change


RANK = "quantization_config.modules.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("svd", RANK, 10**30, f"a size that the method svd does not have ({10**30} is no rank)"),
        ("svd", RANK, 10**9, f"{RANK} is 1000000000, but its weights"),
        ("svd", "quantization_config.embedding_rank", "x", "embedding_rank 'x'"),
        (
            "svd",
            "quantization_config.embedding_rank",
            10**9,
            "quantization_config.embedding_rank is 1000000000, but its",
        ),
        ("svd", "quantization_config.modules", [1], "modules [1]"),
        ("svd", "quantization_config.method", [], "method []"),
        ("svd", "quantization_config", "x", "quantization_config"),
        ("int8", "quantization_config.quantize", 5, "quantize 5"),
        ("int8", "quantization_config.quantize", {"weights": "int5"}, "quantize {'weights': 'int5'}"),
        ("kronecker", "quantization_config.embedding_columns", 3, "3 columns do not divide the width 16"),
        ("llama", "hidden_act", "x", "hidden_act is 'x': no llama model can be built"),
        ("llama", "rope_parameters.rope_type", "x", "rope_parameters.rope_type is 'x'"),
        ("llama", "rope_parameters.rope_theta", "x", "rope_parameters.rope_theta is 'x'"),
        ("llama", "num_key_value_heads", 0, "num_key_value_heads is 0"),
        ("llama", "head_dim", 0, "head_dim is 0"),
        ("llama", "num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, which is more than 16,384"),
        ("llama", "num_hidden_layers", 9_000, "num_hidden_layers is 9000, which is more than the 20 weights beside it"),
        ("llama", "vocab_size", 10**9, "vocab_size is 1000000000, but its weights"),
        ("llama", "vocab_size", 10**30, f"vocab_size is {10**30}"),
        ("llama", "attention_dropout", -1, "attention_dropout is -1, which is no number from 0 to 1"),
        ("llama", "dtype", 3, "dtype is 3, which is no dtype of torch"),
        ("gpt2", "activation_function", "x", "activation_function is 'x'"),
        ("gpt2", "n_layer", 10**9, "n_layer is 1000000000"),
        ("gpt2", "n_inner", -1, "n_inner is -1"),
        ("qwen3_moe", "num_experts_per_tok", -1, "num_experts_per_tok is -1, which is no number from 1 to 4"),
        ("qwen3_moe", "num_experts_per_tok", 10**30, f"num_experts_per_tok is {10**30}, which is no number from 1 to"),
        ("bert", "max_position_embeddings", 10**9, "max_position_embeddings is 1000000000, but its weights"),
    ],
)
def test_values_of_a_config(changed, name, key, value, said):
    folder = changed(name, key, value)
    with pytest.raises(UserError) as caught:
        load_model(folder, dtype=torch.float32)
    assert said in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "network" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("deepseek_v3", {"n_group": 0}, "n_group is 0, which is no divisor of 256 experts"),
        ("deepseek_v3", {"n_group": 3}, "n_group is 3, which is no divisor of 256 experts"),
        ("deepseek_v3", {"n_group": 4, "topk_group": 5}, "topk_group is 5, which is no number from 1 to 4"),
        ("deepseek_v3", {"n_shared_experts": 9, "num_experts_per_tok": 257}, "257, which is no number from 1 to 256"),
        ("deepseek_v3", {"topk_group": None}, "topk_group is None, which is no number from 1 to 8"),
        ("granitemoe", {"num_local_experts": 2, "num_experts_per_tok": None}, "None, which is no number from 1 to 2"),
        ("ernie4_5_moe", {"moe_k": 65}, "moe_k is 65, which is no number from 1 to 64"),
        ("dbrx", {"ffn_config": {"moe_top_k": 0}}, "ffn_config.moe_top_k is 0, which is no number from 1 to 4"),
        ("deepseek_v3", {"n_group": 256, "topk_group": 256, "num_experts_per_tok": 256}, None),
        ("jamba", {"num_experts": 1}, None),  # two experts for a token, but its layers have none
        ("granitemoehybrid", {"num_local_experts": 0}, None),
        ("gemma3_text", {"head_dim": 0}, "head_dim is 0, which is no number from 1"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1, which is no number over 0"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window is None, which is no number of tokens"),
        ("gemma2", {"sliding_window": 0}, "sliding_window is 0, which is no number of tokens"),
        ("mistral", {"sliding_window": 2**40}, f"sliding_window is {2**40}, which is no number of tokens"),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 0, "use_sliding_window": False}, None),
    ],
)
def test_values_that_only_the_first_pass_would_use(name, values, said):
    config = AutoConfig.for_model(name, **values)
    if said is None:
        return check_values(config)
    with pytest.raises(UserError) as caught:
        check_values(config)
    assert said in str(caught.value)


@pytest.mark.parametrize("name", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MASKED_LM_MAPPING_NAMES}))
def test_the_values_that_an_architecture_begins_with_are_fine(name):
    try:
        config = AutoConfig.for_model(name)
        of_text_alone = config.get_text_config() is config
    except Exception:
        pytest.skip("its default config contradicts itself, or has several models of text")
    if of_text_alone:
        check_values(config)


def test_layers_that_differ_in_their_sizes():
    """Gemma 4 has wider heads in some layers; any architecture may have such layers."""
    config = AutoConfig.for_model("llama", per_layer_config={3: {"intermediate_size": 100}})
    if not getattr(config, "is_heterogeneous", False):
        pytest.skip("this transformers has layers of one size alone")
    assert layer_values(config, "intermediate_size") == [11008] * 3 + [100] + [11008] * 28
    assert layer_values(config, "hidden_size") == [4096]
    assert layer_values(config, "no_such_setting") == [None]
    check_values(config)
    config = AutoConfig.for_model("llama", per_layer_config={3: {"intermediate_size": 0}})
    with pytest.raises(UserError, match="intermediate_size is 0, which is no number from 1"):
        check_values(config)


@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        ("adapter_config.json", "r", 10**9, "r is 1000000000, but the adapter's weights have ranks from 1 to"),
        ("adapter_config.json", "megatron_config", {"a": 1}, "adapters of Megatron are not read"),
        ("adapter_config.json", "peft_type", "XLORA", "adapters of type XLORA cannot be merged"),
        ("adapter_config.json", "peft_type", 5, "does not fit its base"),
    ],
)
def test_values_of_an_adapter(changed, file, key, value, said):
    with pytest.raises(UserError, match="adapter_config") as caught:
        load_model(changed("adapter", key, value, file), dtype=torch.float32)
    assert said in str(caught.value)


def test_a_list_with_an_entry_for_each_layer_is_not_made_of_too_many(made, tmp_path, monkeypatch):
    """A config makes one of its layers' kinds where its file has none."""
    monkeypatch.setattr(AutoConfig, "from_pretrained", Mock(side_effect=AssertionError("a config is made")))
    folder = shutil.copytree(made["gpt2"], tmp_path / "modernbert")
    (folder / "config.json").write_text(json.dumps({"model_type": "modernbert", "num_hidden_layers": 10**6}))
    with pytest.raises(UserError, match=r"config\.json: num_hidden_layers is 1000000, which is more than 16,384"):
        load_config(folder)


def test_sizes_without_weights_are_seen_too(changed):
    folder = changed("llama", "num_key_value_heads", 0)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=r"config\.json: num_key_value_heads is 0"):
        load_config(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "svd", "kronecker", "adapter"])
def test_every_key_with_some_values(made, name):
    """The whole of it, each key with each value, is scripts/torture/configs.py."""
    found, work = [], made[name].with_name("work")
    for number, (file, path, value, content) in enumerate(configs.cases(made[name])):
        if number % len(configs.VALUES) != sum(map(len, map(str, path))) % len(configs.VALUES):
            continue
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(made[name], work)
        (work / file.name).write_text(json.dumps(content))
        wrong = configs.outcome(configs.read, work)[1]
        if wrong is not None:
            found.append(f"{file.name} {path} = {value!r:.50}: {wrong}")
    assert not found
