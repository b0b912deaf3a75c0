"""Tokenizers that are a sentencepiece model and nothing else, against sentencepiece itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import LlamaTokenizer

from llmdistill.data.instruct import Example
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer

LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return read_examples(locate("embedded:train"))[:200]


@pytest.fixture(scope="module")
def texts(examples: list[Example]) -> list[str]:
    return [text for example in examples for text in (example.instruction, example.outputs[0])]


def train(file: Path, texts: list[str], **options: Any) -> SentencePieceProcessor:
    file.parent.mkdir(parents=True, exist_ok=True)
    stem = file.parent / "trained"
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(stem), vocab_size=400, minloglevel=2, num_threads=1, **options
    )
    stem.with_suffix(".vocab").unlink()
    stem.with_suffix(".model").rename(file)
    return SentencePieceProcessor(model_file=str(file))


def llama_style(folder: Path, texts: list[str], model_type: str = "bpe") -> SentencePieceProcessor:
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    return train(folder / "tokenizer.model", texts, model_type=model_type, **options)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> tuple[Path, SentencePieceProcessor]:
    folder = tmp_path_factory.mktemp("llama")
    model = llama_style(folder, texts)
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    return folder, model


def test_llama_style(llama: tuple[Path, SentencePieceProcessor], texts: list[str]) -> None:
    folder, model = llama
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, LlamaTokenizer)
    assert len(tokenizer) == 400
    # Accents and symbols outside the vocabulary become bytes.
    for text in [*texts, "Ünïcode — 3 €", "two  spaces", "a\nline"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == model.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == model.bos_id()
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.eos_id()
    assert tokenizer.get_vocab() == {model.id_to_piece(i): i for i in range(400)}


def test_a_model_that_would_be_misread_is_refused(tmp_path: Path, texts: list[str]) -> None:
    bare, unigram = tmp_path / "bare", tmp_path / "unigram"
    llama_style(bare, texts)
    with pytest.raises(UserError, match=r"tokenizer\.model: .* cuts text otherwise .* tokenizer_class"):
        load_tokenizer(bare)
    llama_style(unigram, texts, "unigram")
    (unigram / "tokenizer_config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(UserError, match=r"as a LlamaTokenizer it cuts text otherwise .* type BPE"):
        load_tokenizer(unigram)


def test_missing_package(llama: tuple[Path, SentencePieceProcessor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(UserError, match="needs the package protobuf: pip install protobuf"):
        load_tokenizer(llama[0])
