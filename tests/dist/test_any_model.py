"""Architectures unlike Llama through the whole job: logits with a factor or a cap, and experts, on all ranks."""

import shlex

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer

from support import interrupted_copy, largest_difference, logged, weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """With the embedded tokenizer: a mixture of experts, and two whose logits are more than their head's product."""
    base, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer(locate("embedded:teacher"))
    for name in ("gemma2", "granite", "qwen3_moe"):
        tiny_model(name, scale=3.0, vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    return {folder.name: folder for folder in base.iterdir()}


SETTINGS = shlex.split("""--data.train embedded:train --data.tests {} --train.dtype fp32 --method kd
--train.global_batch_size 4 --train.learning_rate 1e-3 --train.log_every 1 --train.steps 2 --train.save_every 2
--train.keep_checkpoints 2 --scoring.models []""")


def test_own_logits_on_all_ranks_and_after_a_resume(launch, folders, tmp_path):
    models = ("--teacher.model", str(folders["gemma2"]), "--student.model", str(folders["granite"]))
    arguments = (*SETTINGS, *models, "--train.steps", "3", "--ds_config", "zero1")
    sharded = ("--ds_config", "zero3", "--teacher.sharding", "zero3")
    one, two = tmp_path / "one", tmp_path / "two"
    alone = launch(*arguments, "--output_dir", str(one))
    both = launch(*arguments, *sharded, "--output_dir", str(two), ranks=2)
    for said in (alone.stdout, both.stdout):
        assert said.count("teacher: the logits of gemma2 are more than the product of its LM head") == 1
        assert said.count("student: the logits of granite are more than the product of its LM head") == 1
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    # What a kill after step 2 would have left: the run goes on with the ways of its checkpoint, and checks nothing.
    resumed = interrupted_copy(one, tmp_path / "resumed")
    again = launch(*arguments, "--output_dir", str(resumed))
    assert "more than the product" not in again.stdout
    assert logged(resumed, "loss") == logged(one, "loss")
    assert largest_difference(one, resumed) == 0
    assert AutoModelForCausalLM.from_pretrained(resumed / "student").config.model_type == "granite"


def test_factorized_experts_learn_on_two_ranks_as_on_one(launch, folders, tmp_path):
    arguments = (*SETTINGS, "--teacher.model", str(folders["qwen3_moe"]), "--student.factorize.rank", "4")
    one, two = tmp_path / "one", tmp_path / "two"
    launch(*arguments, "--ds_config", "zero1", "--output_dir", str(one))
    launch(*arguments, "--ds_config", "zero3", "--output_dir", str(two), ranks=2)
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    before, after = load_file(one / "untrained" / "model.safetensors"), weights(one)
    factors = [name for name in after if ".experts." in name]
    assert len(factors) == 8
    assert not any(torch.equal(before[name], after[name]) for name in factors)
    for name, value in weights(two).items():
        torch.testing.assert_close(value, after[name], rtol=1e-3, atol=1e-5)
