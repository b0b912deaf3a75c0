"""Writes a Llama as a GGUF file, as llama.cpp's converter does, by the writer of the package gguf."""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.quants import dequantize, quantize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

BLOCK = 32
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def kind_of(name: str, weight: np.ndarray, kind: str) -> GGMLQuantizationType:
    """The type of a weight: vectors, and rows that are no whole blocks, stay in fp32."""
    whole = weight.ndim == 2 and weight.shape[1] % BLOCK == 0
    return GGMLQuantizationType[kind] if whole else GGMLQuantizationType.F32


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: value.numpy() for name, value in model.state_dict().items() if name != "lm_head.weight"}


def rounded(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """The weights of a model after quantizing and dequantizing each of them."""
    found = {}
    for name, weight in weights_of(folder).items():
        of_weight = kind_of(name, weight, kind)
        found[name] = torch.from_numpy(dequantize(quantize(weight, of_weight), of_weight).reshape(weight.shape))
    return found


def write_gguf(
    folder: Path,
    file: Path,
    kind: str = "Q8_0",
    architecture: str = "llama",
    tokens: int | None = None,
    rows: int | None = None,
    begins: bool | None = None,
) -> Path:
    """Write the Llama of a folder with its byte-level BPE; `tokens` and `rows` cut its vocabulary and embeddings.

    `begins` names the padding token as the begin token, and whether it is put before a text.
    """
    config, ids = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    writer = GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_license("cc0-1.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)[:tokens]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in vocabulary])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer["model"]["merges"]]
    writer.add_token_merges([merge for merge in merges if merge.replace(" ", "") in vocabulary])
    writer.add_eos_token_id(ids.eos_token_id)
    writer.add_pad_token_id(ids.pad_token_id)
    if begins is not None:
        writer.add_bos_token_id(ids.pad_token_id)
        writer.add_add_bos_token(begins)
    writer.add_chat_template(TEMPLATE)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in weights_of(folder).items():
        if name == "model.embed_tokens.weight":
            weight = weight[:rows]
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None:  # llama.cpp turns neighbors, transformers halves
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        of_weight = kind_of(name, weight, kind)
        writer.add_tensor(names.get_name(name, [".weight"]), quantize(weight, of_weight), raw_dtype=of_weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
