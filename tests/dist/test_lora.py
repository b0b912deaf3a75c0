"""Students that train adapters alone, under DeepSpeed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support import interrupted_copy, largest_difference, logged, weights

pytestmark = pytest.mark.dist

LORA = ("--student.lora.rank", "4")


def test_two_ranks_equal_one(trained):
    assert largest_difference(trained(*LORA), trained(*LORA, ranks=2, ds_config="zero3")) < 1e-6


def test_student_has_the_structure_of_the_untrained_one(trained):
    folder = trained(*LORA)
    untrained, student = load_file(folder / "untrained" / "model.safetensors"), weights(folder)
    assert {name: (v.shape, v.dtype) for name, v in untrained.items()} == {
        name: (v.shape, v.dtype) for name, v in student.items()
    }
    for name, value in untrained.items():
        is_adapted = ".layers." in name and value.ndim == 2
        assert torch.equal(value, student[name]) != is_adapted, name
    configs = [json.loads((folder / name / "config.json").read_text()) for name in ("untrained", "student")]
    assert configs[0] == configs[1]
    assert configs[0]["quantization_config"]["modules"]


def test_resumed_run_is_bit_equal(trained, launch, settings, tmp_path):
    whole = trained(*LORA, ranks=2, ds_config="zero3")
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "ds_configs/zero3.json", "--output_dir", str(folder), *LORA, ranks=2)
    assert largest_difference(whole, folder) == 0


def test_bf16_adapters_train(trained):
    folder = trained(*LORA, "--train.dtype", "bf16")
    losses = logged(folder, "loss")
    exact = logged(trained(*LORA), "loss")
    # bf16 keeps 8 bits: a relative 2^-8 a value.
    assert losses[-1] == pytest.approx(exact[-1], rel=0.02)
    assert weights(folder)["model.norm.weight"].dtype == torch.bfloat16


def test_adapter_as_teacher(trained, tiny_teacher, tmp_path):
    """In shards it equals the merged model, as a whole one does in tests/unit/models/test_adapters.py."""
    torch.manual_seed(0)
    settings = PeftConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_teacher), settings)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    model.save_pretrained(adapter)
    model.merge_and_unload().save_pretrained(merged)
    for file in tiny_teacher.glob("tokenizer*"):
        shutil.copy(file, merged)
    expected = trained("--teacher.model", str(merged))
    sharded = trained("--teacher.model", str(adapter), "--teacher.sharding", "zero3", ranks=2, ds_config="zero3")
    assert largest_difference(expected, sharded) < 1e-6
