from __future__ import annotations

import pytest
from tiny import SETTINGS, tiny_config
from transformers import BertConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, XLMRobertaConfig

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
def test_shapes(config: PreTrainedConfig) -> None:
    shape = shape_of(config)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.intermediate_size) == (2, 16, 4, 40)
    # The same layers whether the model has a head or not.
    model, bare = build_meta(config, "lm_head"), build_meta(config)
    assert [type(layer) for layer in layers_of(model)] == [type(layer) for layer in layers_of(bare)]


def test_sliding_windows() -> None:
    assert shape_of(MistralConfig(**SMALL, sliding_window=7)).windows == (7, 7)
    assert shape_of(MistralConfig(**SMALL, sliding_window=None)).windows == (None, None)
    assert shape_of(Qwen2Config(**SMALL, sliding_window=7)).windows == (None, None)
    mixed = Qwen3Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert shape_of(mixed).windows == (None, 7)


def test_an_encoder_as_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="is_decoder"):
        family_of(BertConfig(is_decoder=True))
