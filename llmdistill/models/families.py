"""The supported architectures: the names of their modules, the axes of their parameters, and the sizes of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal, cast

from llmdistill.errors import UserError
from llmdistill.models.general import causal_by_classes, find_layers, position_after_padding
from llmdistill.models.traced import Traced, trace_layers

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


Axis = Literal["whole", "hidden", "ffn", "query", "key", "value", "context", "fused", "head"]
"""The meaning of an axis of a parameter. whole: a size that the student's shape does not change (tokens, positions,
classes); hidden: the width; ffn: the feed-forward width; query, key, value: the features of all heads of queries, keys
or values; context: the features of all heads of the attention output; fused: queries, keys and values concatenated;
head: the features of one head."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture: the module names of its parts, and other differences between architectures."""

    layers: str
    """Name of the list of layers within the base model."""
    embedding: str | None
    """Name within the base model: the module whose output is the input of the first layer; None if this input is the
    output of no module."""
    attention: str
    """Name within a layer: the module that calls the attention function."""
    ffn_up: str | None
    """Name within a layer: the projection to the feed-forward width, which may hold the gate too; None for experts."""
    ffn_gate: str | None = None
    """Name within a layer: the gate projection of the feed-forward part; None if there is no gate."""
    ffn_down: str
    """Name within a layer: the projection back to the model's width, or the experts with their router."""
    lm_head: str = "lm_head"
    """Name within the whole model: the LM head, or the first of its modules, if the model has a head."""
    causal: bool = True
    """True for a decoder (a token sees only itself and the tokens before it), False for an encoder."""
    layer_axes: Mapping[str, tuple[Axis, ...]] | None = None
    """Axes (outputs, inputs) of the modules of a layer, for students of another shape; None allows none. The axes
    of the feed-forward modules follow from the names above. A norm that is not listed has the width."""
    ffn_size: str = "intermediate_size"
    """The config's name for the feed-forward width; if its value is None, the feed-forward width is 4 x the width."""
    positions_after_padding: bool = False
    """Whether positions start at pad_token_id + 1, so that fewer positions are usable than the config says."""
    makes_mask: bool = False
    """Whether the model makes its attention mask itself, which allows no packed rows: attention has more to know than
    causality, padding and a window to the left."""
    projections: tuple[str, str, str] | None = None
    """Names within the attention: the projections whose outputs are tapped as queries, keys and values, before any
    rotation; None: the attention uses transformers' interface, which gives all three."""
    scores_are_products: bool = True
    """Whether attention is the softmax of the products of queries and keys alone, or something is done to them."""
    next_sentence: str | None = None
    """Class name of the model with a next-sentence head; None if there is no such class."""


_LLAMA = Family(
    layers="layers",
    embedding="embed_tokens",
    attention="self_attn",
    ffn_up="mlp.up_proj",
    ffn_gate="mlp.gate_proj",
    ffn_down="mlp.down_proj",
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
    embedding="drop",  # the dropout after the sum of tokens and positions
    attention="attn",
    ffn_up="mlp.c_fc",
    ffn_down="mlp.c_proj",
    layer_axes={"attn.c_attn": ("fused", "hidden"), "attn.c_proj": ("hidden", "context")},
    ffn_size="n_inner",
)
_BERT = Family(
    layers="encoder.layer",
    embedding="embeddings",
    attention="attention.self",
    ffn_up="intermediate.dense",
    ffn_down="output.dense",
    lm_head="cls.predictions",
    causal=False,
    layer_axes={
        "attention.self.query": ("query", "hidden"),
        "attention.self.key": ("key", "hidden"),
        "attention.self.value": ("value", "hidden"),
        "attention.output.dense": ("hidden", "context"),
    },
    next_sentence="BertForPreTraining",
)
_ROBERTA = replace(_BERT, lm_head="lm_head", positions_after_padding=True, next_sentence=None)

_DISTILBERT = Family(
    layers="transformer.layer",
    embedding="embeddings",
    attention="attention",
    ffn_up="ffn.lin1",
    ffn_down="ffn.lin2",
    lm_head="vocab_transform",  # the first of the head's modules, which stand in no module of their own
    causal=False,
    layer_axes={
        "attention.q_lin": ("query", "hidden"),
        "attention.k_lin": ("key", "hidden"),
        "attention.v_lin": ("value", "hidden"),
        "attention.out_lin": ("hidden", "context"),
    },
    ffn_size="hidden_dim",
)

_OLMO2 = replace(
    _LLAMA,
    layer_axes={
        **(_LLAMA.layer_axes or {}),
        "self_attn.q_norm": ("query",),  # over all heads at once
        "self_attn.k_norm": ("key",),
    },
)
_PHI = Family(
    layers="layers",
    embedding="embed_dropout",
    attention="self_attn",
    ffn_up="mlp.fc1",
    ffn_down="mlp.fc2",
    makes_mask=True,
)
# Its dropout after the embedding is a function, so that no module returns the input of the first layer.
_STARCODER2 = replace(_PHI, embedding=None, ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
_GPT_NEOX = Family(
    layers="layers",
    embedding="emb_dropout",
    attention="attention",
    ffn_up="mlp.dense_h_to_4h",
    ffn_down="mlp.dense_4h_to_h",
    makes_mask=True,
)
_OPT = Family(
    layers="decoder.layers",
    embedding=None,
    attention="self_attn",
    ffn_up="fc1",
    ffn_down="fc2",
    ffn_size="ffn_dim",
    makes_mask=True,  # positions count the tokens of the mask
)
_MOE = Family(
    layers="layers",
    embedding="embed_tokens",
    attention="self_attn",
    ffn_up=None,
    ffn_down="mlp",
    ffn_size="moe_intermediate_size",
    makes_mask=True,
)
# A small ELECTRA projects its embeddings to the width, a large one has no such module.
_ELECTRA = replace(
    _BERT, embedding=None, lm_head="generator_predictions", next_sentence=None, layer_axes=None, makes_mask=True
)
_MODERNBERT = Family(
    layers="layers",
    embedding="embeddings",
    attention="attn",
    ffn_up="mlp.Wi",
    ffn_down="mlp.Wo",
    lm_head="head",
    causal=False,
    makes_mask=True,  # windows to both sides
)
_GEMMA2 = replace(
    _LLAMA,
    embedding=None,
    layer_axes=None,
    makes_mask=True,
    projections=("q_proj", "k_proj", "v_proj"),
    scores_are_products=False,  # they are capped, which no stock sdpa does
)
_MPNET = replace(
    _ROBERTA,
    attention="attention.attn",
    layer_axes=None,
    makes_mask=True,
    projections=("q", "k", "v"),
    scores_are_products=False,  # a bias of the distance is added
)
_DEBERTA = replace(
    _BERT,
    next_sentence=None,
    layer_axes=None,
    makes_mask=True,
    projections=("query_proj", "key_proj", "value_proj"),
    scores_are_products=False,  # those of content and distance are added
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": replace(_LLAMA, embedding=None, layer_axes=None, makes_mask=True),  # its norms multiply by 1 + weight
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_LLAMA, layer_axes=None),  # its norms multiply by 1 + weight
    "smollm3": replace(_LLAMA, layer_axes=None),  # whether a layer has rotary embeddings depends on the layer index
    "olmo2": _OLMO2,
    "granite": replace(_LLAMA, embedding=None),  # the embedding is multiplied
    "cohere": replace(_LLAMA, layer_axes=None, makes_mask=True),  # its rotary pairs are neighbors
    "gpt2": _GPT2,
    "phi": _PHI,
    # Queries, keys and values are in one matrix, and so are gate and up.
    "phi3": replace(_LLAMA, ffn_up="mlp.gate_up_proj", ffn_gate=None, layer_axes=None, makes_mask=True),
    "starcoder2": _STARCODER2,
    "gpt_neox": _GPT_NEOX,
    "opt": _OPT,
    "qwen3_moe": _MOE,
    "electra": _ELECTRA,
    "mpnet": _MPNET,
    "deberta-v2": _DEBERTA,
    "modernbert": _MODERNBERT,
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": _DISTILBERT,
}
"""Supported architectures, by the `model_type` of their config. To support another one, add an entry here, or insert
one at runtime before a model is loaded. Its attention module must use transformers' attention interface, and pass the
layer's `sliding_window` to it if there is one, or have `projections`; the entry defines everything else. The parts of
a model without an entry are traced (`models.traced`); if that fails, it is trained by the terms on its output alone."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that layer-to-layer distillation depends on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Features of a head of queries and keys."""
    value_dim: int
    """Features of a head of values."""
    intermediate_size: int
    windows: tuple[int | None, ...]
    """Sliding attention window of each layer in tokens, including the token itself; None for full attention."""


def has_own_masks(config: PreTrainedConfig) -> bool:
    """Return whether the attention masks of a model are left to transformers, so that no rows can be packed."""
    return not has_family(config) or family_of(config).makes_mask


def has_family(config: PreTrainedConfig) -> bool:
    """Return whether the architecture of a config has an entry, which describes only layers of equal sizes.

    An encoder that is set to be a decoder is another architecture.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or getattr(config, "is_heterogeneous", False):
        return False
    return family.causal or not getattr(config, "is_decoder", False)


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a config: its entry, or one traced. Raises UserError if the layers cannot be tapped."""
    if has_family(config):
        return FAMILIES[config.model_type]
    parts = _trace_parts(config)
    return Family(
        layers=parts.layers,
        embedding=None,
        attention=parts.attention,
        ffn_up=parts.ffn_up,
        ffn_gate=parts.ffn_gate,
        ffn_down=parts.ffn_down,
        causal=causal_by_classes(config),
        makes_mask=True,
        scores_are_products=parts.scores_are_products,
    )


def _trace_parts(config: PreTrainedConfig) -> Traced:
    causal_by_classes(config)  # raises a clearer error for a model of an unsupported kind
    try:
        return trace_layers(config)
    except UserError as error:
        why = "has no entry in FAMILIES of llmdistill/models/families.py"
        why = "has layers that differ" if config.model_type in FAMILIES else why
        raise UserError(
            f"{config.model_type} {why}, and {error}, so nothing "
            "can use its inner tensors: take method sft, kd or seqkd, on-policy data too, and a student by SVD, "
            "Kronecker products, LoRA or student.model"
        ) from None


def is_causal(config: PreTrainedConfig) -> bool:
    """Return whether a model of any architecture is a decoder. Raises UserError if it is no encoder either."""
    return family_of(config).causal if has_family(config) else causal_by_classes(config)


def has_rotary(config: PreTrainedConfig) -> bool:
    """Return whether the model uses rotary embeddings."""
    return hasattr(config, "rope_parameters")


def has_segments(config: PreTrainedConfig) -> bool:
    """Return whether a model tells the two segments of a sequence apart (BERT's token types)."""
    types: int | None = getattr(config, "type_vocab_size", None)
    return types is not None and types > 1


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's layers, for a model with any head and of any architecture."""
    return cast("nn.ModuleList", model.base_model.get_submodule(layers_name(model)))


def layers_name(model: PreTrainedModel) -> str:
    """Return the name of the list of layers within the base model."""
    return family_of(model.config).layers if has_family(model.config) else find_layers(model)


def base_name(model: PreTrainedModel, name: str) -> str:
    """Return the name of a module or parameter inside the base model, the same for a model with any head."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def is_head(model: PreTrainedModel, name: str) -> bool:
    """Return whether a parameter belongs to a head; the pooler counts as one, because some models lack it."""
    in_base = model.base_model is model or name.startswith(f"{model.base_model_prefix}.")
    return not in_base or ".pooler." in f".{name}"


def shape_of(config: PreTrainedConfig) -> Shape:
    """Return the sizes of a model, from its config alone."""
    if not has_family(config):
        parts = _trace_parts(config)
        return Shape(**{field.name: getattr(parts, field.name) for field in fields(Shape)})
    num_layers, num_heads, hidden_size = config.num_hidden_layers, config.num_attention_heads, config.hidden_size
    intermediate_size = getattr(config, family_of(config).ffn_size)
    # A config may have the key without a value.
    head_dim = getattr(config, "head_dim", None) or hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None:  # Mistral has no layer types: all its layers slide
        kinds = ["sliding_attention"] * num_layers
    return Shape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        intermediate_size=4 * hidden_size if intermediate_size is None else intermediate_size,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
    )


def max_positions(config: PreTrainedConfig, limit: int) -> int:
    """Return the maximum number of tokens in a sequence of a model, at most `limit`."""
    names = ("max_position_embeddings", "max_seq_len")  # the latter of MPT
    positions: int | None = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    if positions is None or positions < 1:  # XLNet's are relative and without a limit, which it calls -1
        return limit
    return min(positions - first_position(config), limit)


def first_position(config: PreTrainedConfig) -> int:
    """Return the position id of the first token of a sequence."""
    if not has_family(config):
        return position_after_padding(config)
    return config.pad_token_id + 1 if family_of(config).positions_after_padding else 0
