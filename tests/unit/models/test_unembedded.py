"""A tokenizer with a token for which its model has no embedding, as Gemma 3 of text alone has one for images."""

import json

import pytest
import torch
from tiny import save_decoder
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmdistill
from llmdistill.data.corpus import store_corpus
from llmdistill.data.instruct import Limits
from llmdistill.data.masking import Masking
from llmdistill.data.pairs import PairExample, encode_pairs
from llmdistill.data.sampler import Share
from llmdistill.data.stream import ExampleStream, StreamLoader
from llmdistill.data.targets import _tokenize
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer

IMAGE = "<image_soft_token>"
ROWS = [{"instruction": f"Name the month after {n}.", "output": "It is May."} for n in range(6)]
REFUSED = r"'<image_soft_token>' is a token without an embedding \(its id is 1024, and the model has 1024 embeddings\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama of 1024 embeddings, and a tokenizer of 1025 tokens."""
    folder = save_decoder(tmp_path_factory.mktemp("larger"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    assert len(tokenizer) == 1 + AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == 1025
    tokenizer.save_pretrained(folder)
    return folder


def test_it_is_accepted_everywhere(folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Name the month.\nIt is May.\n" * 20, encoding="utf-8")
    weights = {"weighting": "gradients", "allocation": "loss", "calibration": {"data": ROWS, "examples": 4}}
    student = llmdistill.compress(folder, target_params="90%", output=tmp_path / "student", **weights)
    scores = llmdistill.evaluate(folder, {"rows": ROWS[:2], "text": text}, decoding="greedy", max_length=300)
    plain = AutoTokenizer.from_pretrained(tmp_path / "student")
    assert plain.convert_tokens_to_ids(IMAGE) == 1024  # the tokenizer is saved as it was
    in_memory = llmdistill.evaluate(student, str(text), tokenizer=plain, kind="text")
    assert in_memory["perplexity"] > 1
    assert scores["text"]["perplexity"] > 1
    settings = {"train.dtype": "fp32", "scoring.models": []}
    run = llmdistill.distill(folder, tmp_path / "student", ROWS, "kd", steps=1, global_batch_size=2, settings=settings)
    assert torch.isfinite(torch.tensor(run.history[0]["loss"]))


def test_it_is_refused_where_the_data_use_it(folder, tmp_path):
    """With the line of the row or of the text."""

    def jsonl(name, rows):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return file

    asked = jsonl("asked.jsonl", [*ROWS[:2], {"instruction": f"What is in {IMAGE}?", "output": "A cat."}])
    answered = jsonl("answered.jsonl", [ROWS[0], {"instruction": "Draw a cat.", "output": f"Here: {IMAGE}"}])
    texts = jsonl("texts.jsonl", [{"text": "plain"}, {"text": f"an image {IMAGE}"}])
    plain = tmp_path / "plain.txt"
    plain.write_text("Name the month.\n\n" + f"An image {IMAGE}\n" + "It is May.\n" * 9, encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    limits = Limits()

    def train(file, kind="instructions"):
        settings = {"train.dtype": "fp32", "scoring.models": [], "data.kind": kind}
        llmdistill.distill(folder, folder, file, "kd", steps=1, global_batch_size=2, settings=settings)

    def calibrate(data):
        llmdistill.compress(folder, target_params="90%", weighting="activations", calibration=data)

    def stream():
        share = Share(global_batch_size=2, micro_batch_size=2, seed=0)
        StreamLoader(ExampleStream(asked, 0, 2), tokenizer, limits, share, list).global_batch(1)

    for place, refused in {
        f"{asked}:3": lambda: train(asked),
        f"{answered}:2": lambda: train(answered),
        f"{plain}:3": lambda: train(plain, "text"),
        f"{texts}:2": lambda: train(texts, "text"),
        f"{asked}:3 ": lambda: calibrate(asked),
        "row 2": lambda: llmdistill.evaluate(folder, ["May", f"an image {IMAGE}"], kind="text"),
        f"{plain}:3 ": lambda: llmdistill.evaluate(folder, plain),
        "data: row 1": lambda: llmdistill.evaluate(folder, [{"instruction": IMAGE, "output": "yes"}]),
        f"{asked}:3  ": stream,
        f"{texts}:2 ": lambda: store_corpus(texts, tokenizer, cache_dir=tmp_path / "cache"),
        "row 1": lambda: encode_pairs([PairExample(IMAGE, None, 0, 0)], tokenizer, 16),
        f"see {IMAGE}": lambda: _tokenize([f"see {IMAGE}"], tokenizer),
    }.items():
        with pytest.raises(UserError, match=REFUSED) as error:
            refused()
        assert place.strip() in str(error.value), place


def test_its_padding_and_mask_tokens_may_have_no_embedding(tmp_path):
    folder = save_decoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder)
    loaded = load_tokenizer(folder)
    assert loaded.pad_token_id == loaded.eos_token_id
    assert loaded.mask_token is None
    assert Masking.of(loaded, 0.15).vocabulary.max() < 1024


@pytest.mark.parametrize("name", ["eos_token", "cls_token", "sep_token"])
def test_a_mark_of_every_text_needs_an_embedding(tmp_path, name):
    folder = save_decoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({name: "<mark>"})
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="token '<mark>' has the id 1024, and the model has 1024 embeddings: take"):
        load_tokenizer(folder)
