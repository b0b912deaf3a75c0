"""A real pretrained decoder, SmolLM2-135M-Instruct: what an invented world cannot show.

They run where LLMDISTILL_SMOLLM2 names a folder with its GGUF file, or with its Hugging Face files:

    LLMDISTILL_SMOLLM2=DIR python -m pytest -n 0 tests/unit/test_smollm2.py
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import llmdistill
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.data.prompts import CHAT, resolve_prompt
from llmdistill.embedded import locate
from llmdistill.models.gguf import gguf_file, origin
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.tasks.text_windows import WindowSizes, cut_windows, score_windows

PLACE = os.environ.get("LLMDISTILL_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not PLACE, reason="LLMDISTILL_SMOLLM2 names no folder of SmolLM2-135M-Instruct")

TEXT = (
    "The capital of France is Paris. The Seine flows through the city, and many bridges cross it. In the nineteenth "
    "century wide avenues were built, and railway stations joined the city to the rest of the country. Today about two "
    "million people live in Paris, and many more visit its museums, parks and markets every year. "
)
CALIBRATION = [
    "Bread is baked from flour, water, salt and yeast. The dough rests in a warm place until it has doubled, and is "
    "then shaped and put into a hot oven. Every village once had a baker, who rose long before the sun. ",
    "A computer reads instructions from its memory, one after the other, and does what each of them says. Programs are "
    "written in languages that people can read, and translated before they run. The first ones filled whole rooms. ",
]
QUESTION = "What is the capital of France?"
SIZE = "80%"


@pytest.fixture(scope="module")
def folder() -> Path:
    return locate(PLACE)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def teacher(folder):
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def student_folder(folder, tmp_path_factory) -> Path:
    """A student by activations; the calibration has 2 texts of at most 64 tokens, so that it takes seconds."""
    output = tmp_path_factory.mktemp("smollm2") / "student"
    data = {"data": CALIBRATION, "examples": 2, "held_out": 0}
    settings = {"target_params": SIZE, "weighting": "activations", "max_length": 64}
    llmdistill.compress(folder, output=output, calibration=data, **settings)
    return output


@pytest.fixture(scope="module")
def student(student_folder):
    return load_model(student_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(tokenizer):
    return tokenizer(TEXT, return_tensors="pt").input_ids


def logits(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def perplexity(model, tokenizer) -> float:
    windows = cut_windows(TEXT, tokenizer, model.config, WindowSizes(24), name="text")
    return float(score_windows(model, windows, batch_size=2, name="text")["perplexity"])


def first_terms(teacher, student_folder, ids, **settings):
    """The terms of a student's first loss, whose gradients are finite."""
    student = load_model(student_folder, dtype=torch.float32).train()
    loss = llmdistill.DistillationLoss(teacher, student, **settings)
    batch = {"input_ids": ids[:, :32], "attention_mask": torch.ones_like(ids[:, :32]), "labels": ids[:, :32]}
    found = loss(batch)
    found.backward()
    loss.remove()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in student.parameters())
    return found.terms


def test_it_answers_a_question(teacher, tokenizer):
    turns = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = teacher.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(written) == "The capital of France is Paris.<|im_end|>"


def test_an_instruction_is_asked_in_its_own_turns(tokenizer):
    prompt = resolve_prompt(None, [tokenizer])
    assert prompt == CHAT
    (found,) = encode_prompts([Example(QUESTION, "", ("Paris",))], tokenizer, Limits(prompt=prompt)).ids
    text = tokenizer.decode(found)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_its_tokenizer_keeps_digits_apart_and_every_text(tokenizer):
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    for text in (TEXT, "Größe  \n\t— 한국 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 49152


def test_its_weights_are_those_of_the_gguf_file(folder, teacher):
    file = gguf_file(PLACE)
    if file is None:
        pytest.skip("LLMDISTILL_SMOLLM2 names a folder without a GGUF file")
    from gguf import GGUFReader, dequantize

    names = {"token_embd.weight": "embed_tokens", "blk.29.ffn_down.weight": "layers.29.mlp.down_proj"}
    names["blk.7.attn_v.weight"] = "layers.7.self_attn.v_proj"  # queries and keys have another order of rows
    for tensor in GGUFReader(file).tensors:
        if tensor.name in names:
            found = teacher.model.get_submodule(names[tensor.name]).weight
            assert torch.equal(found, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)))
    assert origin(folder) == "dequantized from 4 bits (Q4_1)"


def test_its_size_is_the_published_one(folder):
    found = llmdistill.sizes(folder, target_params=SIZE)
    assert found["teacher_params"] == 134_515_008
    assert found["ratio"] == pytest.approx(0.8, abs=0.005)


def test_perplexity_is_that_of_a_plain_loop(teacher, tokenizer, ids):
    losses = []
    for window in ids[0].unfold(0, 24, 24):
        predicted = logits(teacher, window[None])[0].log_softmax(-1)
        losses += [-predicted[place, token].item() for place, token in enumerate(window[1:])]
    expected = pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)
    assert perplexity(teacher, tokenizer) == expected
    found = llmdistill.evaluate(teacher, [TEXT], kind="text", tokenizer=tokenizer, window=24)
    assert found["perplexity"] == expected


def test_a_weighted_student_is_of_use_before_training(student, tokenizer):
    """Of this model plain SVD at this size leaves a perplexity of millions."""
    assert perplexity(student, tokenizer) < 1000


def test_a_student_has_the_promised_size_and_names_its_teacher(folder, student_folder, student):
    found = llmdistill.sizes(folder, target_params=SIZE)["student_params"]
    assert sum(each.numel() for each in student.parameters()) == found
    card = (student_folder / "README.md").read_text(encoding="utf-8")
    assert ("dequantized from 4 bits (Q4_1)" in card) == (origin(folder) is not None)


def test_a_saved_student_is_bit_equal(student, ids, tmp_path):
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again, ids), logits(student, ids))


def test_an_export_is_a_stock_model_of_the_same_outputs(student_folder, student, ids, tmp_path):
    llmdistill.export(student_folder, tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert type(dense.model.layers[0].mlp.up_proj) is torch.nn.Linear
    torch.testing.assert_close(logits(dense, ids), logits(student, ids), rtol=0, atol=5e-3)


def test_no_term_of_makd_drowns_the_others(teacher, student_folder, ids):
    terms = first_terms(teacher, student_folder, ids, method="makd")
    assert max(terms.values()) < 30 * min(terms.values())


def test_hidden_states_alone_make_the_plain_sum_of_makd(teacher, student_folder, ids):
    """Which is why MaKD divides by the size of each token's features where nothing is set."""
    terms = first_terms(teacher, student_folder, ids, method="makd", scale="plain")
    assert terms.pop("hidden") > 30 * max(terms.values())
