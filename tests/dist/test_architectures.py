"""Students of other families and shapes through the whole job: factorize, five steps, export."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from llmdistill.cli import main
from llmdistill.embedded import locate

from support import logged

pytestmark = pytest.mark.dist

SHORT = ["--train.steps", "5", "--train.log_every", "1", "--train.dtype", "fp32", "--data.tests", "{}"]


def check_run(folder: Path, dense: Path) -> None:
    """The student has moved, is smaller than its teacher, and exports to a stock model with its logits."""
    before = load_file(folder / "untrained" / "model.safetensors")
    after = load_file(folder / "student" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    losses = logged(folder, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["student"]["params"] == metrics["untrained"]["params"] < metrics["teacher"]["params"]
    assert main(["export", "--to", "dense", "--model", str(folder / "student"), "--output", str(dense)]) == 0
    assert "quantization_config" not in json.loads((dense / "config.json").read_text())
    tokens = torch.arange(20)[None]
    logits = [AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (folder / "student", dense)]
    assert torch.allclose(*logits, atol=1e-5, rtol=0)


def test_untied_llama_with_factorized_embedding_and_rank_per_pattern(launch, tmp_path):
    source = locate("embedded:teacher")
    teacher = tmp_path / "teacher"
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=LlamaConfig.from_pretrained(source).vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(teacher)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, teacher)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"teacher: {{model: {teacher}}}\n"
        "student: {factorize: {ranks: {'*self_attn*': 8, '*mlp*': 12}, embedding_rank: 20, sigma: balanced}}\n"
        "train: {global_batch_size: 8, learning_rate: 1.0e-3}\n"
        "makd: {matrix_layers: all, layer_layers: '2-3', label: 0.5}\n",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    launch("--recipe", str(recipe), "--ds_config", "ds_configs/zero1.json", "--output_dir", str(folder), *SHORT)
    check_run(folder, tmp_path / "dense")


@pytest.mark.skipif("LLMDISTILL_DATA" not in os.environ, reason="LLMDISTILL_DATA is unset: it names the real data")
def test_gpt2_on_real_data_end_to_end(launch, tmp_path):
    data = Path(os.environ["LLMDISTILL_DATA"])
    teacher = tmp_path / "teacher"
    torch.manual_seed(2)
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=512, initializer_range=0.1)
    GPT2LMHeadModel(config).save_pretrained(teacher)
    for file in (data / "tokenizers" / "gpt2").iterdir():
        shutil.copy(file, teacher)
    recipe = tmp_path / "recipe.yaml"
    seed_tasks = data / "instruct" / "seed_tasks.jsonl"
    recipe.write_text(
        f"teacher: {{model: {teacher}}}\n"
        "student: {factorize: {target_params: 99%}}\n"
        f"data: {{train: {seed_tasks}, long_prompts: drop}}\n"
        "train: {global_batch_size: 8, micro_batch_size: 2, learning_rate: 1.0e-3}\n",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    ran = launch(
        *("--recipe", str(recipe), "--ds_config", "ds_configs/zero3.json", "--output_dir", str(folder), *SHORT), ranks=2
    )
    assert "170 examples: 5 dropped for a long prompt" in ran.stdout
    check_run(folder, tmp_path / "dense")
    scored = launch(
        *("--model", str(folder / "student"), "--data", str(seed_tasks), "--long_prompts", "drop", "--limit", "3"),
        *("--decoding", "greedy", "--max_length", "264", "--json", "--output", str(tmp_path / "scores")),
        program="eval/instruct.py",
        ranks=0,
    )
    result = json.loads(scored.stdout)
    assert result["sets"]["seed_tasks"]["examples"] == 3
    assert 0 <= result["sets"]["seed_tasks"]["rougeL"] <= 100
    assert len((tmp_path / "scores" / "seed_tasks.jsonl").read_text().splitlines()) == 3
