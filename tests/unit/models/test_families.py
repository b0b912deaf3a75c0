from __future__ import annotations

import pytest
from tiny import SETTINGS, tiny_config
from transformers import AutoConfig, BertConfig

from llmdistill.errors import UserError
from llmdistill.models.families import FAMILIES, family_of, layers_of, shape_of
from llmdistill.models.load import build_meta

WIDTHS = ("intermediate_size", "ffn_dim", "moe_intermediate_size", "n_inner", "hidden_dim")


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes(name: str) -> None:
    settings = SETTINGS["roberta" if name == "xlm-roberta" else name]
    widths = {key: 40 for key in WIDTHS if key in settings}
    config = AutoConfig.for_model(name, **{**settings, "num_hidden_layers": 2, **widths})
    shape = shape_of(config)
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.intermediate_size) == (2, 16, 4, 40)
    assert len(layers_of(build_meta(config))) == 2


def test_sliding_windows() -> None:
    assert shape_of(tiny_config("mistral", sliding_window=7)).windows == (7, 7)
    assert shape_of(tiny_config("mistral", sliding_window=None)).windows == (None, None)
    assert shape_of(tiny_config("qwen2", sliding_window=7)).windows == (None, None)
    mixed = tiny_config("qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=1)
    assert shape_of(mixed).windows == (None, 7)


def test_an_encoder_as_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="is_decoder"):
        family_of(BertConfig(is_decoder=True))
