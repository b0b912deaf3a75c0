"""Models unlike a folder of Llama through the whole job: other architectures and logits, experts, GGUF, an adapter."""

import json
import re
import shlex
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer

from gguf_model import write_gguf
from support import interrupted_copy, largest_difference, logged, weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """With the embedded tokenizer: a mixture of experts, and two whose logits are more than their head's product.

    The config of the Granite tells a softcap too, which the model does not have.
    """
    base, tokenizer = tmp_path_factory.mktemp("models"), load_tokenizer(locate("embedded:teacher"))
    for name in ("gemma2", "granite", "qwen3_moe"):
        more = {"final_logit_softcapping": 0.5} if name == "granite" else {}
        sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
        tiny_model(name, scale=3.0, **sizes, **more).save_pretrained(base / name)
        tokenizer.save_pretrained(base / name)
    return {folder.name: folder for folder in base.iterdir()}


SETTINGS = shlex.split("""--data.train embedded:train --data.tests {} --train.dtype fp32 --method kd
--train.global_batch_size 4 --train.learning_rate 1e-3 --train.log_every 1 --train.steps 2
--scoring.models []""")


@pytest.mark.slow
def test_own_logits_of_a_student_beside_a_capped_teacher_on_all_ranks_and_after_a_resume(launch, folders, tmp_path):
    models = ("--teacher.model", str(folders["gemma2"]), "--student.model", str(folders["granite"]))
    arguments = (*SETTINGS, *models, "--train.steps", "3", "--train.save_every", "2")
    one, two, sharded = tmp_path / "one", tmp_path / "two", ("--ds_config", "zero3", "--teacher.sharding", "zero3")
    alone = launch(*arguments, "--output_dir", str(one))
    both = launch(*arguments, *sharded, "--output_dir", str(two), ranks=2)
    for said in (alone.stdout, both.stdout):
        said_of = [name for name in ("teacher", "student") if f"{name}: the logits of" in said]
        assert said_of == ["student"], "its config is wrong, and that of the teacher is not"
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    # What a kill after step 2 would have left: the run goes on with the ways of its checkpoint, and checks nothing.
    resumed = interrupted_copy(one, tmp_path / "resumed")
    assert "more than the product" not in launch(*arguments, "--output_dir", str(resumed)).stdout
    assert largest_difference(one, resumed) == 0
    assert AutoModelForCausalLM.from_pretrained(resumed / "student").config.model_type == "granite"


@pytest.mark.slow
def test_factorized_experts_learn_on_two_ranks_as_on_one(launch, folders, tmp_path):
    arguments = (*SETTINGS, "--teacher.model", str(folders["qwen3_moe"]), "--student.factorize.rank", "4")
    arguments += ("--student.factorize.weighting", "none")
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


def test_gpt2_on_real_data_end_to_end(launch, real_data, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(real_data / "tokenizers" / "gpt2", teacher)
    torch.manual_seed(2)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(teacher)
    seed_tasks, folder = str(real_data / "instruct" / "seed_tasks.jsonl"), tmp_path / "run"
    words = ("--teacher.model", str(teacher), "--student.factorize.target_params", "99%", "--data.train", seed_tasks)
    words += ("--data.long_prompts", "drop", "--data.max_length", "300", "--data.tests", "{}", "--train.steps", "5")
    words += ("--train.global_batch_size", "4", "--train.learning_rate", "1e-3", "--train.log_every", "1")
    words += ("--student.factorize.calibration.examples", "8", "--student.factorize.calibration.micro_batch_size", "4")
    ran = launch(*words, "--ds_config", "zero3", "--output_dir", str(folder), ranks=2)
    assert "170 examples: 5 dropped for a long prompt" in ran.stdout
    losses = logged(folder, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["student"]["params"] == metrics["untrained"]["params"] < metrics["teacher"]["params"]


def test_a_gguf_teacher_is_dequantized_once(tiny_teacher, launch, settings, tmp_path):
    """Its weights are compared in tests/unit/models/test_gguf.py."""
    file = write_gguf(tiny_teacher, tmp_path / "tiny.gguf", "Q8_0")
    run = tmp_path / "run"
    words = (*settings, "--method", "kd", "--scoring.models", "[]", "--train.steps", "1")
    done = launch(*words, "--teacher.model", str(file), "--output_dir", str(run), ranks=2)
    # Rank 0 says it, which may find what rank 1 has made.
    assert len(re.findall(r"tiny\.gguf: dequantiz(ing|ed from) 8 bits \(Q8_0\), (once; )?kept in ", done.stderr)) == 1
    assert f"{file}, " in done.stdout
    record = json.loads((run / "metrics.json").read_text())["run"]
    assert record["teacher_origin"] == "dequantized from 8 bits (Q8_0)"
    assert "Made from: tiny.gguf, dequantized from 8 bits (Q8_0)" in (run / "student" / "README.md").read_text()


def test_an_adapter_as_teacher(trained, tiny_teacher, tmp_path):
    """In shards it equals the merged model, as a whole one does in tests/unit/models/test_adapters.py."""
    torch.manual_seed(0)
    peft = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_teacher), peft)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    model.save_pretrained(adapter)
    model.merge_and_unload().save_pretrained(merged)
    for file in tiny_teacher.glob("tokenizer*"):
        shutil.copy(file, merged)
    short = ("--train.steps", "2")
    expected = trained("--teacher.model", str(merged), *short)
    sharded = trained("--teacher.model", str(adapter), "--teacher.sharding", "zero3", *short, ranks=2)
    assert largest_difference(expected, sharded) < 1e-6
