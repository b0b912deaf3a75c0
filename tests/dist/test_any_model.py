"""Models without an entry through the whole job: their own logits are taken on all ranks, and after a resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer

from support import interrupted_copy, weights
from tiny import tiny_model

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A Gemma 2 and a Granite, whose logits are more than the product of their head, with the embedded tokenizer."""
    base, source = tmp_path_factory.mktemp("models"), locate("embedded:teacher")
    words = len(load_tokenizer(source))
    for name in ("gemma2", "granite"):
        model = tiny_model(name, scale=3.0, vocab_size=words, max_position_embeddings=512)
        model.save_pretrained(base / name)
        for file in source.glob("*token*"):
            shutil.copy(file, base / name)
    return {name: base / name for name in ("gemma2", "granite")}


def losses(folder: Path) -> list[float]:
    return [json.loads(row)["loss"] for row in (folder / "metrics.jsonl").read_text().splitlines()]


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
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    # What a kill after step 2 would have left: the run goes on with the ways of its checkpoint, and checks nothing.
    resumed = interrupted_copy(one, tmp_path / "resumed")
    again = launch("--ds_config", "zero1", "--output_dir", str(resumed), *arguments, *steps)
    assert "more than the product" not in again.stdout
    assert losses(resumed) == losses(one)
    assert all(torch.equal(value, weights(one)[key]) for key, value in weights(resumed).items())
    assert AutoModelForCausalLM.from_pretrained(resumed / "student").config.model_type == "granite"
