"""A tiny encoder of sentences in the files of sentence-transformers."""

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertModel
from word_models import save_tokenizer

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c", "d", "e", "f"]


def encoder(folder: Path, *, seed: int = 0) -> BertModel:
    """A tiny encoder that takes the first token as the embedding, as sentence-transformers saves it."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    sizes |= {"initializer_range": 0.5}  # or else all cosines are nearly 1, and their ranks rounding
    model = BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, WORDS)
    modules = [{"path": path, "type": f"x.{path[2:] or 'Transformer'}"} for path in ("", "1_Pooling")]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "cls"}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 4}')
    return model
