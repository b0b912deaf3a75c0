"""A teacher small enough to answer in milliseconds, and prompts for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from word_models import save_tokenizer

TOKENS = ("Below", "is", "Name", "a", "colour", "red", "green", "blue", "###", "Response", ":", "Input")
PROMPTS = ("Name a colour", "Name", "a a a is", "colour : red green", "is", "Below red blue", "green green")


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Folder of a random Llama with a tokenizer of a dozen words."""
    vocabulary = ("</s>", "[PAD]", "[UNK]", *TOKENS)
    torch.manual_seed(35)  # it finishes some answers, leaves one empty, and its greedy choices are no ties
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=80,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=0,
    )
    folder = tmp_path / "teacher"
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, vocabulary, marked=False, eos_token="</s>")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Prompts with answers that are not looked at."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"instruction": text, "input": "a red" * (n % 2), "output": "?"} for n, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
