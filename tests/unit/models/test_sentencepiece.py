"""Tokenizers that are a sentencepiece model and nothing else, against sentencepiece itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from transformers import LlamaTokenizer

from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer

LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    examples = read_examples(locate("embedded:train"))[:200]
    return [text for example in examples for text in (example.instruction, example.outputs[0])]


def llama_style(folder: Path, texts: list[str], model_type: str = "bpe") -> SentencePieceProcessor:
    folder.mkdir(exist_ok=True)
    options = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    options |= {"vocab_size": 400, "minloglevel": 2, "num_threads": 1, "model_type": model_type}
    SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"), **options)
    (folder / "tokenizer.vocab").unlink()
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


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
