"""A real pretrained decoder, SmolLM2-135M-Instruct: what an invented world cannot show.

They run where LLMDISTILL_SMOLLM2 names a folder with its GGUF file, or with its Hugging Face files:

    LLMDISTILL_SMOLLM2=DIR python -m pytest -n 0 tests/unit/test_smollm2.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import llmdistill
from llmdistill.embedded import locate
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import World
from llmdistill.tasks.windows import cut_windows, score_windows

PLACE = os.environ.get("LLMDISTILL_SMOLLM2", "")
pytestmark = pytest.mark.skipif(not PLACE, reason="LLMDISTILL_SMOLLM2 names no folder of SmolLM2-135M-Instruct")

TEXT = (
    "The capital of France is Paris. The Seine flows through the city, and many bridges cross it. In the nineteenth "
    "century wide avenues were built, and railway stations joined the city to the rest of the country. Today about two "
    "million people live in Paris, and many more visit its museums, parks and markets every year. "
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
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
    """A student by activations; the calibration has 2 texts of 64 tokens, so that it takes seconds."""
    output = tmp_path_factory.mktemp("smollm2") / "student"
    data = {"data": [TEXT * 2, " ".join(reversed(TEXT.split(". ")))], "examples": 2, "held_out": 0}
    settings = {"target_params": SIZE, "weighting": "activations", "max_length": 64}
    llmdistill.compress(folder, output=output, calibration=data, **settings)
    return output


@pytest.fixture(scope="module")
def student(student_folder):
    return load_model(student_folder, dtype=torch.float32)


def answer(model, tokenizer) -> str:
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(written)


def perplexity(model, tokenizer) -> float:
    windows = cut_windows(TEXT, tokenizer, model.config, name="text", window=24)
    return float(score_windows(model, windows, batch_size=2, world=World.alone(), name="text")["perplexity"])


def test_it_answers_a_question(teacher, tokenizer):
    assert answer(teacher, tokenizer) == "The capital of France is Paris.<|im_end|>"


def test_a_weighted_student_is_of_use_before_training(teacher, student, tokenizer):
    """Of this model plain SVD at this size leaves a perplexity of millions."""
    assert perplexity(teacher, tokenizer) < perplexity(student, tokenizer) < 1000
