"""Models of every type of decoder and encoder in transformers, shrunk by rule with what is peculiar to each."""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

VOCABULARY = 320
WIDTH, HEADS, LENGTH = 32, 4, 128
AS_DECODER = " as a decoder"

_SIZES: list[tuple[int, str]] = [
    (VOCABULARY, "vocab_size"),
    (
        WIDTH,
        "hidden_size d_model n_embd dim emb_dim embedding_dim attention_hidden_size lru_width pooler_hidden_size "
        "word_embed_proj_dim true_hidden_size pronunciation_embed_dim shape_embed_dim prediction_head_size "
        "router_hidden_size attn_hidden_size d_latents",
    ),
    (WIDTH + 8, "embedding_size input_embedding_size output_embedding_size embedding_rank"),
    (
        HEADS,
        "num_attention_heads n_head n_heads attention_heads num_heads swa_num_attention_heads index_n_heads "
        "linear_num_heads linear_num_value_heads decoder_attention_heads encoder_attention_heads "
        "num_self_attention_heads num_cross_attention_heads num_query_groups",
    ),
    (
        LENGTH,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
        "max_2d_position_embeddings rel_extent",
    ),
    (
        48,
        "intermediate_size ffn_dim d_inner ffn_hidden_size hidden_dim dff dim_ff feed_forward_size decoder_ffn_dim "
        "encoder_ffn_dim intermediate_size_mlp dense_intermediate_size n_inner",
    ),
    (
        24,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size intra_bottleneck_size",
    ),
    (
        16,
        "q_lora_rank kv_lora_rank o_lora_rank index_head_dim time_step_rank mamba_dt_rank laurel_rank hc_lowrank "
        "adapter_rank original_max_position_embeddings",
    ),
    (
        8,
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim mamba_d_head mamba_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim d_head dim_head kv_channels attention_head_size "
        "sliding_window sliding_window_size attention_window attention_window_size window_size local_attention "
        "chunk_size mamba_chunk_size attention_chunk_size mamba_d_state state_size ssm_state_size d_rel index_topk "
        "hidden_size_per_layer_input num_landmarks keep_window_size local_attention_window_len rotary_dim "
        "ple_embed_dim",
    ),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num gated_norm_rank block_size"),
    (8, "mamba_n_heads mamba_num_heads"),
    (
        2,
        "linear_num_key_heads num_experts_per_tok moe_topk "
        "moe_k num_experts_per_token topk_group n_group num_expert_group n_groups mamba_n_groups mamba_ngroups",
    ),
]
_SMALL = {name: size for size, names in _SIZES for name in names.split()}
_KEY_VALUE_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "encoder_layers", "decoder_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


@cache
def model_types() -> dict[str, Any]:
    """The class that builds each model type: masked for those that are encoders, causal for the others.

    Encoders that can be decoders, and the decoders of models that have an encoder too, come a second time.
    """
    causal, masked = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
    names = [name for name in sorted({*causal, *masked}) if name in CONFIG_MAPPING_NAMES]
    types = {name: AutoModelForMaskedLM if name in masked else AutoModelForCausalLM for name in names}
    both = [name for name in names if name in causal and causal[name] != masked.get(name, causal[name])]
    decoders = {*both, *(name for name in names if name in causal and has_encoder(name))}
    return types | {f"{name}{AS_DECODER}": AutoModelForCausalLM for name in sorted(decoders)}


def has_encoder(name: str) -> bool:
    """Whether the default config of a type is that of an encoder and a decoder."""
    try:
        return bool(AutoConfig.for_model(name).is_encoder_decoder)
    except Exception:  # the default config of some contradicts itself
        return False


def of_text_alone(name: str) -> bool:
    """Whether the default config of a type is that of one model of text."""
    try:
        config = AutoConfig.for_model(name.removesuffix(AS_DECODER))
        return config.get_text_config() is config
    except Exception:  # the default config of some contradicts itself
        return False


_WIDE = {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 16}
_HALVES = {"layer_types": ["linear_attention", "full_attention"]}
_REFORMER_DROPOUTS = (
    "hidden_dropout_prob",
    "lsh_attention_probs_dropout_prob",
    "local_attention_probs_dropout_prob",
)
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "max_position_embeddings": LENGTH,
        "encoder_hash_byte_group_vocab": 64,
        **{
            f"{part}_config": {
                "hidden_size": WIDTH,
                "hidden_size_global": WIDTH,
                "intermediate_size": 48,
                "num_attention_heads": HEADS,
                "num_hidden_layers": 2,
                "max_position_embeddings": LENGTH,
                "vocab_size": VOCABULARY,
            }
            for part in ("encoder", "decoder", "global", "patcher")
        },
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"head_dim": 20},
    "esm": {"pad_token_id": 0, "mask_token_id": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "funnel": {"block_sizes": [2, 2]},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY},
    "git": {
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    },
    "granitemoehybrid": _HALVES,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4},
    "lfm2": {"num_hidden_layers": 2, "full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {
        "num_hidden_layers": 4,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mobilebert": {"hidden_size": 48, "intra_bottleneck_size": WIDTH},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64},
    "phi4_multimodal": {
        "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    },
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds": False,  # with it, training takes texts of one length alone
        "hash_seed": 0,
        **dict.fromkeys(_REFORMER_DROPOUTS, 0.0),
    },
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "squeezebert": {"embedding_size": WIDTH},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
        **_WIDE,
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"],
        "n_mamba_heads": 8,
        **_WIDE,
    },
}
"""Settings of the types that the rule does not build."""


def shrunk_config(name: str) -> PreTrainedConfig:
    """The small config of a model type: every size of its default config made small, and the layers it needs to have
    one of each kind."""
    name, decoder = name.removesuffix(AS_DECODER), name.endswith(AS_DECODER)
    whole = AutoConfig.for_model(name)
    values = {key: value for key, value in whole.to_dict().items() if value is not None}
    settings = {
        key: min(size, values[key]) for key, size in _SMALL.items() if type(values.get(key)) is int and values[key] > 0
    }
    settings |= {
        key: HEADS if all_heads == values[key] else min(2, values[key])
        for key, all_heads in ((key, values.get(of)) for key, of in _KEY_VALUE_HEADS.items() if key in values)
    }
    depths = [key for key in _DEPTHS if key in values]
    if depths:
        depth = values[depths[0]]
        lists = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == depth}
        kinds = [tuple(map(str, kind)) for kind in zip(*lists.values(), strict=True)]
        least = max(2, 1 + max((kinds.index(kind) for kind in set(kinds)), default=0))
        settings |= dict.fromkeys(depths, min(depth, least))
        for key, value in lists.items():
            small = value[: min(depth, least)]
            settings[key] = [min(each, HEADS) for each in small] if "heads" in key else small
    per_layer = values.get("per_layer_config", {})  # with keys such as "02"
    settings |= (
        {
            "per_layer_config": {
                layer: {
                    key: value and max(1, value * settings[key] // values[key]) if settings.get(key) else value
                    for key, value in sizes.items()
                }
                for layer, sizes in per_layer.items()
                if int(layer) < settings[depths[0]]
            }
        }
        if per_layer
        else {}
    )
    settings["vocab_size"] = VOCABULARY
    settings |= {key: value for key, value in _TOKENS.items() if key in values}
    settings |= {"is_decoder": True, "is_encoder_decoder": False} if decoder else {}
    return AutoConfig.for_model(name, **(settings | _OVERRIDES.get(name, {})))


def shrunk_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of a type in evaluation mode, without a parameter that is 0 or 1 everywhere."""
    torch.manual_seed(seed)
    model = model_types()[name].from_config(shrunk_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
