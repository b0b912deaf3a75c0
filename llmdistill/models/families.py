"""What is known of each architecture: where its parts are, how they are shaped, and the sizes of its models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

from llmdistill.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


Axis = Literal["whole", "hidden", "ffn", "query", "key", "value", "context", "fused", "head"]
"""What an axis of a parameter counts: things that a shape does not change (words, positions, classes), the width, the
feed-forward width, all heads' features of queries, keys or values, of what attention gives (context), of queries, keys
and values in a row (fused), or one head's features (head)."""

_DECODER_HEADS: Mapping[str, tuple[Axis, ...]] = {"lm_head": ("whole", "hidden"), "score": ("whole", "hidden")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: its parts as module names, and what else differs between architectures."""

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
    layer_axes: Mapping[str, tuple[Axis, ...]]
    """Axes (outputs, inputs) of the modules of a layer, for students of another shape. Those of the feed-forward part
    follow from the names above, and norms have the width unless they stand here."""
    head_axes: Mapping[str, tuple[Axis, ...]] = field(default_factory=lambda: _DECODER_HEADS)
    """The same for what stands around the layers, from the whole model; embeddings are known by their type."""
    ffn_size: str = "intermediate_size"
    """The config's name for the feed-forward width; where the config leaves it open it is four times the width."""
    positions_after_padding: bool = False
    """Whether positions count from behind the padding token's number, so that there are fewer than the config says."""
    next_sentence: str | None = None
    """Class of the model with a next-sentence head, if there is such a head."""


_LLAMA = Family(
    layers="layers",
    embedding="embed_tokens",
    attention="self_attn",
    ffn_up="mlp.up_proj",
    ffn_gate="mlp.gate_proj",
    ffn_down="mlp.down_proj",
    lm_head="lm_head",
    causal=True,
    layer_axes={
        "self_attn.q_proj": ("query", "hidden"),
        "self_attn.k_proj": ("key", "hidden"),
        "self_attn.v_proj": ("value", "hidden"),
        "self_attn.o_proj": ("hidden", "context"),
        "self_attn.q_norm": ("head",),
        "self_attn.k_norm": ("head",),
    },
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
    layer_axes={"attn.c_attn": ("fused", "hidden"), "attn.c_proj": ("hidden", "context")},
    ffn_size="n_inner",
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
    layer_axes={
        "attention.self.query": ("query", "hidden"),
        "attention.self.key": ("key", "hidden"),
        "attention.self.value": ("value", "hidden"),
        "attention.output.dense": ("hidden", "context"),
    },
    head_axes={
        "pooler.dense": ("hidden", "hidden"),
        "cls.predictions.transform.dense": ("hidden", "hidden"),
        "cls.predictions.decoder": ("whole", "hidden"),
        "cls.predictions": ("whole",),
        "cls.seq_relationship": ("whole", "hidden"),
        "classifier": ("whole", "hidden"),
    },
    next_sentence="BertForPreTraining",
)
_ROBERTA = replace(
    _BERT,
    lm_head="lm_head",
    head_axes={
        "pooler.dense": ("hidden", "hidden"),
        "lm_head": ("whole", "hidden"),
        "lm_head.dense": ("hidden", "hidden"),
        "lm_head.decoder": ("whole", "hidden"),
        "classifier": ("whole", "hidden"),
        "classifier.dense": ("hidden", "hidden"),
        "classifier.out_proj": ("whole", "hidden"),
    },
    positions_after_padding=True,
    next_sentence=None,
)

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
"""Supported architectures, by `model_type` of their config. A new one is a new entry here, or one that a user puts here
before a model is loaded: the attention module must go through transformers' attention interface, and everything else
follows from the entry."""


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
    intermediate_size = getattr(config, family_of(config).ffn_size)
    head_dim = getattr(config, "head_dim", None)
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=hidden_size // num_heads if head_dim is None else head_dim,
        intermediate_size=4 * hidden_size if intermediate_size is None else intermediate_size,
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
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return limit
    if family_of(config).positions_after_padding:
        positions -= config.pad_token_id + 1
    return min(positions, limit)
