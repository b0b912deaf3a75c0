"""Tiny random models of many architectures, built in milliseconds: the list behind the table of docs/students.md."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.config import FactorizeConfig
from llmdistill.embedded import locate
from llmdistill.models.families import is_causal
from llmdistill.models.load import attention_of
from llmdistill.students.convert import factorize
from llmdistill.students.sizes import plan_factors

WORDS = 60
"""Vocabulary of the models."""

_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 3},
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "gemma": {**_GROUPED, "head_dim": 8},
    "gemma2": {**_GROUPED, "head_dim": 8, "sliding_window": 3},
    "gemma3_text": {**_GROUPED, "head_dim": 8, "sliding_window": 3},
    "smollm3": _GROUPED,
    "olmo2": _GROUPED,
    "granite": {**_GROUPED, "logits_scaling": 8.0},
    "cohere": {**_GROUPED, "logit_scale": 0.0625},
    "phi": _SIZES,
    "phi3": _GROUPED,
    "starcoder2": _GROUPED,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 40, "vocab_size": WORDS},
    "gpt_neox": _SIZES,
    "opt": {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "qwen3_moe": {**_GROUPED, "head_dim": 8, **_EXPERTS},
    "bert": _SIZES,
    "roberta": _SIZES,
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "vocab_size": WORDS, "pad_token_id": 0},
    "electra": {**_SIZES, "embedding_size": 12},
    "mpnet": _SIZES,
    "deberta-v2": {**_SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0},
    "modernbert": {**_SIZES, "num_hidden_layers": 4, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
}
"""The settings of a config by its `model_type`."""


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model."""
    return AutoConfig.for_model(name, **{**SETTINGS[name], **changes})


def tiny_model(
    name: str, *, seed: int = 0, head: str = "lm_head", scale: float = 1.0, **changes: Any
) -> PreTrainedModel:
    """A tiny random model in evaluation mode; `scale` multiplies its matrices, so that its logits are not near 0."""
    config = tiny_config(name, **changes)
    auto: Any = AutoModelForCausalLM if is_causal(config) else AutoModelForMaskedLM
    if head == "sequence":
        auto = AutoModelForSequenceClassification
    torch.manual_seed(seed)
    model = auto.from_config(config, **attention_of(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model


def shaken(model: PreTrainedModel, scale: float = 0.1) -> PreTrainedModel:
    """The model after noise on every parameter: fresh biases are 0 and norms 1, and would not be missed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    """What a tiny model returns first, such as its logits, always for the same tokens."""
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids.to(model.device))[0]


def random_student(auto: Any, config: PreTrainedConfig, settings: dict[str, Any]) -> PreTrainedModel:
    """A random model in evaluation mode, factorized as the settings say; Kronecker products are those with shapes."""
    torch.manual_seed(0)
    model = shaken(auto.from_config(config)).eval()
    factorize(model, plan_factors(model, FactorizeConfig(**settings), "kronecker" if "shapes" in settings else "svd"))
    return model


def save_decoder(folder: Path, *, seed: int = 0, kind: Any = LlamaForCausalLM, **changes: Any) -> Path:
    """Save a random Llama with grouped-query attention and the embedded tokenizer; returns its folder."""
    source = locate("embedded:teacher")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    # With this range the outputs are far from uniform, so that there is something to learn.
    settings = {"vocab_size": AutoConfig.from_pretrained(source).vocab_size, "initializer_range": 0.2, **sizes, **heads}
    torch.manual_seed(seed)
    kind(LlamaConfig(**{**settings, **changes})).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder
