"""Tiny random BERTs without dropout, whose masks would differ between ranks, and tokenizers of whole words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, PreTrainedTokenizerFast

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def word_tokenizer(
    words: Sequence[str], *, marked: bool = True, letters: bool = False, **settings: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, which have the special tokens.

    `marked` puts [CLS] and [SEP] around texts, and with `letters` each letter of a text is a token.
    """
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated") if letters else pre_tokenizers.Whitespace()
    if marked:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(mark, list(words).index(mark)) for mark in ("[CLS]", "[SEP]")],
        )
    marks = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk", "mask")}
    there = {name: mark for name, mark in marks.items() if mark in words}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **there, **settings)


def save_tokenizer(folder: Path, words: Sequence[str], *, marked: bool = True, **settings: Any) -> None:
    """Save a tokenizer of these words."""
    word_tokenizer(words, marked=marked, **settings).save_pretrained(folder)


def save_bert(
    folder: Path, words: Sequence[str], kind: type[PreTrainedModel] = BertForMaskedLM, **settings: Any
) -> None:
    """Save a random model of this kind for the words; `settings` are those of its config."""
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    kind(BertConfig(vocab_size=len(words), **{**SIZES, **dropout, **settings})).save_pretrained(folder)
