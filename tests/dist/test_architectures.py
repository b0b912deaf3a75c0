"""A student of another family than Llama through the whole job: factorize, five steps, export, scores."""

import json
import shutil

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from llmdistill.cli import main

from support import logged


def test_gpt2_on_real_data_end_to_end(launch, real_data, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(real_data / "tokenizers" / "gpt2", teacher)
    torch.manual_seed(2)
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=512, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(teacher)
    recipe = tmp_path / "recipe.yaml"
    seed_tasks = real_data / "instruct" / "seed_tasks.jsonl"
    recipe.write_text(
        f"teacher: {{model: {teacher}}}\n"
        "student: {factorize: {target_params: 99%}}\n"
        f"data: {{train: {seed_tasks}, long_prompts: drop, max_length: 300}}\n"
        "train: {steps: 5, global_batch_size: 4, micro_batch_size: 1, learning_rate: 1.0e-3, log_every: 1}\n",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    ran = launch("--recipe", str(recipe), "--ds_config", "zero3", "--output_dir", str(folder), ranks=2)
    assert "170 examples: 5 dropped for a long prompt" in ran.stdout
    before, after = (load_file(folder / name / "model.safetensors") for name in ("untrained", "student"))
    assert before.keys() == after.keys()
    losses = logged(folder, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    metrics, dense = json.loads((folder / "metrics.json").read_text()), tmp_path / "dense"
    assert metrics["student"]["params"] == metrics["untrained"]["params"] < metrics["teacher"]["params"]
    assert main(["export", "--to", "dense", "--model", str(folder / "student"), "--output", str(dense)]) == 0
    assert "quantization_config" not in json.loads((dense / "config.json").read_text())
    tokens = torch.arange(20)[None]
    logits = [AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (folder / "student", dense)]
    assert torch.allclose(*logits, atol=1e-5, rtol=0)
    scored = launch(
        *("--model", str(folder / "student"), "--data", str(seed_tasks), "--long_prompts", "drop", "--limit", "3"),
        *("--decoding", "greedy", "--max_length", "264", "--json", "--output", str(tmp_path / "scores")),
        program="eval/instruct.py",
        ranks=0,
    )
    result = json.loads(scored.stdout)["sets"]["seed_tasks"]
    assert result["examples"] == 3
    assert 0 <= result["rougeL"] <= 100
    assert len((tmp_path / "scores" / "seed_tasks.jsonl").read_text().splitlines()) == 3
