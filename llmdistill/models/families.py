"""What is known of each architecture: where its parts are, and the numbers that two models must share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from llmdistill.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Family:
    """The parts of one architecture, as module names."""

    layers: str
    """List of layers, from the base model."""
    embedding: str
    """From the base model: the module whose output goes into the first layer."""
    attention: str
    """From a layer: the module that calls the attention function."""
    ffn_up: str
    """From a layer: the projection to the feed-forward width."""
    ffn_gate: str | None
    """From a layer: the gate projection beside it, if there is one."""
    ffn_down: str
    """From a layer: the projection back to the model's width."""
    lm_head: str
    """From the whole model: its language-model head, where it has one."""
    causal: bool
    """Decoder (a token sees only what stands before it) or encoder."""


_LLAMA = Family(
    layers="layers",
    embedding="embed_tokens",
    attention="self_attn",
    ffn_up="mlp.up_proj",
    ffn_gate="mlp.gate_proj",
    ffn_down="mlp.down_proj",
    lm_head="lm_head",
    causal=True,
)
_GPT2 = Family(
    layers="h",
    embedding="drop",
    attention="attn",
    ffn_up="mlp.c_fc",
    ffn_gate=None,
    ffn_down="mlp.c_proj",
    lm_head="lm_head",
    causal=True,
)
_BERT = Family(
    layers="encoder.layer",
    embedding="embeddings",
    attention="attention.self",
    ffn_up="intermediate.dense",
    ffn_gate=None,
    ffn_down="output.dense",
    lm_head="cls.predictions",
    causal=False,
)
_ROBERTA = replace(_BERT, lm_head="lm_head")

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _GPT2,
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
"""Supported architectures, by `model_type` of their config. A new one is a new entry here: the attention module
must go through transformers' attention interface, and everything else follows from the names."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that layer-to-layer distillation depends on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    windows: tuple[int | None, ...]
    """Sliding attention window of each layer in tokens, the token itself included; None where it sees them all."""


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model's config.

    Raises:
        UserError: the architecture is not supported, or an encoder's config makes it a decoder.
    """
    family = family_named(config.model_type)
    if not family.causal and getattr(config, "is_decoder", False):
        raise UserError(
            f"config.json: is_decoder is true for a {config.model_type}, which is supported as an encoder only: "
            "set it to false or take a decoder architecture"
        )
    return family


def family_named(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        UserError: the architecture is not supported.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"config.json: model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}; "
            "to add one, give it an entry in FAMILIES of llmdistill/models/families.py"
        )
    return FAMILIES[model_type]


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a model's layers, whatever head the model has."""
    return cast("nn.ModuleList", model.base_model.get_submodule(family_of(model.config).layers))


def shape_of(config: PreTrainedConfig) -> Shape:
    """The sizes of a model, from its config alone."""
    num_layers, num_heads, hidden_size = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    intermediate_size = getattr(config, "intermediate_size", None)
    if intermediate_size is None:  # GPT-2 names it otherwise, and leaves it open for the usual factor
        n_inner = getattr(config, "n_inner", None)
        intermediate_size = 4 * hidden_size if n_inner is None else n_inner
    head_dim = getattr(config, "head_dim", None)
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=hidden_size // num_heads if head_dim is None else head_dim,
        intermediate_size=intermediate_size,
        windows=_windows(config),
    )


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or layer_types is None:  # Mistral has no layer types: all its layers slide
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def max_positions(config: PreTrainedConfig, limit: int) -> int:
    """Tokens of a sequence that a model has positions for, at most a limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return limit
    if config.model_type in ("roberta", "xlm-roberta"):  # they count from behind the padding token's
        positions -= config.pad_token_id + 1
    return min(int(positions), limit)
