"""Architectures unlike Llama through the whole job: logits with a factor or a cap, and experts, on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer

from support import interrupted_copy, logged, weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """With the embedded tokenizer: a mixture of experts, and two whose logits are more than their head's product."""
    base, source = tmp_path_factory.mktemp("models"), locate("embedded:teacher")
    words = len(load_tokenizer(source))
    names = ("gemma2", "granite", "qwen3_moe")
    for name in names:
        model = tiny_model(name, scale=3.0, vocab_size=words, max_position_embeddings=512)
        model.save_pretrained(base / name)
        for file in source.glob("*token*"):
            shutil.copy(file, base / name)
    return {name: base / name for name in names}


def test_own_logits_on_all_ranks_and_after_a_resume(launch, folders, tmp_path):
    arguments = [
        *("--teacher.model", str(folders["gemma2"]), "--student.model", str(folders["granite"]), "--method", "kd"),
        *("--data.train", "embedded:train", "--data.tests", "{}", "--train.dtype", "fp32"),
        *("--train.global_batch_size", "4", "--train.learning_rate", "1e-3", "--train.log_every", "1"),
        *("--train.save_every", "2", "--scoring.models", "[]", "--train.keep_checkpoints", "2"),
    ]
    steps = ["--train.steps", "3"]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = launch("--ds_config", "zero1", "--output_dir", str(one), *arguments, *steps)
    sharded = [*arguments, *steps, "--teacher.sharding", "zero3"]
    both = launch("--ds_config", "zero3", "--output_dir", str(two), *sharded, ranks=2)
    for said in (alone.stdout, both.stdout):
        assert said.count("teacher: the logits of gemma2 are more than the product of its LM head") == 1
        assert said.count("student: the logits of granite are more than the product of its LM head") == 1
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    # What a kill after step 2 would have left: the run goes on with the ways of its checkpoint, and checks nothing.
    resumed = interrupted_copy(one, tmp_path / "resumed")
    again = launch("--ds_config", "zero1", "--output_dir", str(resumed), *arguments, *steps)
    assert "more than the product" not in again.stdout
    assert logged(resumed, "loss") == logged(one, "loss")
    assert all(torch.equal(value, weights(one)[key]) for key, value in weights(resumed).items())
    assert AutoModelForCausalLM.from_pretrained(resumed / "student").config.model_type == "granite"


def test_factorized_experts_learn_on_two_ranks_as_on_one(launch, folders, tmp_path):
    arguments = [
        *("--teacher.model", str(folders["qwen3_moe"]), "--student.factorize.rank", "4", "--method", "kd"),
        *("--data.train", "embedded:train", "--data.tests", "{}", "--train.dtype", "fp32"),
        *("--train.global_batch_size", "4", "--train.learning_rate", "1e-3", "--train.log_every", "1"),
        *("--train.steps", "2", "--scoring.models", "[]"),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    launch("--ds_config", "zero1", "--output_dir", str(one), *arguments)
    launch("--ds_config", "zero3", "--output_dir", str(two), *arguments, ranks=2)
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    before, after = load_file(one / "untrained" / "model.safetensors"), weights(one)
    factors = [name for name in after if ".experts." in name]
    assert len(factors) == 8
    assert not any(torch.equal(before[name], after[name]) for name in factors)
    for name, value in weights(two).items():
        torch.testing.assert_close(value, after[name], rtol=1e-3, atol=1e-5)
