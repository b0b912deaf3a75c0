"""A teacher small enough to answer in milliseconds, and prompts for it."""

import json

import pytest
from tiny import tiny_model
from word_models import save_tokenizer

TOKENS = ("Below", "is", "Name", "a", "colour", "red", "green", "blue", "###", "Response", ":", "Input")
PROMPTS = ("Name a colour", "Name", "a a a is", "colour : red green", "is", "Below red blue", "green green")


@pytest.fixture
def teacher(tmp_path):
    """Folder of a random Llama with a tokenizer of a dozen words."""
    vocabulary = ("</s>", "[PAD]", "[UNK]", *TOKENS)
    # With this seed it finishes some answers, leaves one empty, and its greedy choices are no ties.
    folder = tmp_path / "teacher"
    sizes = {"vocab_size": len(vocabulary), "intermediate_size": 16, "num_hidden_layers": 1}
    tokens = {"max_position_embeddings": 80, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    tiny_model("llama", seed=35, initializer_range=0.6, **sizes, **tokens).save_pretrained(folder)
    save_tokenizer(folder, vocabulary, marked=False, eos_token="</s>")
    return folder


@pytest.fixture
def data(tmp_path):
    """Prompts with answers that are not looked at."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"instruction": text, "input": "a red" * (n % 2), "output": "?"} for n, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
