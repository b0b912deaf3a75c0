from __future__ import annotations

import pytest
from tiny import SETTINGS, tiny_config
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    XLMRobertaConfig,
)

from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, layers_of, shape_of
from llmdistill.models.load import build_meta

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 40, "vocab_size": 30}
WIDTHS = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "n_inner", "hidden_dim")
CONFIGS: list[PreTrainedConfig] = [XLMRobertaConfig(**SMALL)]
CONFIGS += [
    tiny_config(name, num_hidden_layers=2, **{key: 40 for key in WIDTHS if key in settings})
    for name, settings in SETTINGS.items()
    if name in FAMILIES
]


def test_every_family_is_tested() -> None:
    assert {config.model_type for config in CONFIGS} == set(FAMILIES)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_named_modules_are_there(config: PreTrainedConfig) -> None:
    family, model = family_of(config), build_meta(config)
    layers = layers_of(model)
    assert isinstance(layers, nn.ModuleList)
    assert len(layers) == 2
    # The same layers whether the model has a head or not.
    assert layers_of(AutoModel.from_config(config))[1].__class__ is layers[1].__class__
    shape = shape_of(config)
    for layer in layers:
        attention = layer.get_submodule(family.attention)
        assert "Attention" in type(attention).__name__
        if family.ffn_up is not None:
            both = 80 if config.model_type in ("modernbert", "phi3") else 40
            assert sorted(layer.get_submodule(family.ffn_up).weight.shape) == [16, both]
            assert sorted(layer.get_submodule(family.ffn_down).weight.shape) == [16, 40]
        if family.ffn_gate is not None:
            assert layer.get_submodule(family.ffn_gate).weight.shape == (40, 16)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads) == (2, 16, 4)
    assert shape.intermediate_size == 40


def test_shapes() -> None:
    grouped = shape_of(LlamaConfig(**SMALL, num_key_value_heads=2))
    assert (grouped.num_kv_heads, grouped.head_dim) == (2, 4)
    assert shape_of(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)).head_dim == 8
    gpt2 = shape_of(GPT2Config())
    assert (gpt2.num_kv_heads, gpt2.head_dim, gpt2.intermediate_size) == (12, 64, 3072)


def test_sliding_windows() -> None:
    assert shape_of(LlamaConfig(**SMALL)).windows == (None, None)
    assert shape_of(MistralConfig(**SMALL, sliding_window=7)).windows == (7, 7)
    assert shape_of(MistralConfig(**SMALL, sliding_window=None)).windows == (None, None)
    assert shape_of(Qwen2Config(**SMALL, sliding_window=7)).windows == (None, None)
    mixed = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert shape_of(mixed).windows == (None, 7)


def test_unknown_architecture() -> None:
    with pytest.raises(
        UserError, match=r"bloom has no entry in FAMILIES.*llama, .*gpt2.*: take method sft, kd or seqkd"
    ):
        family_of(BloomConfig())


def test_an_encoder_as_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="is_decoder"):
        family_of(BertConfig(is_decoder=True))
