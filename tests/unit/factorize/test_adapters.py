"""Adapter folders where folders of models are read and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModelForCausalLM

from llmdistill.config import FactorizeConfig, LoraConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import compress
from llmdistill.factorize.export import export_dense
from llmdistill.models.adapters import add_lora
from llmdistill.models.companions import copy_companions
from llmdistill.models.load import load_model, merge_adapter

TOKENS = torch.arange(24).view(2, 12)


def save_adapter(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random adapter in `folder`, its base beside it, with files of both that are no weights."""
    base = folder.parent / "base"
    tiny_model("llama").to(dtype).save_pretrained(base)
    settings = PeftConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), settings).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "../base"}))
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json"):
        (base / name).write_text(f'{{"of": "base {name}"}}')
    return folder


def test_merged_folder_is_a_stock_model(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", torch.bfloat16)
    merge_adapter(adapter, tmp_path / "merged")
    merged = tmp_path / "merged"
    assert not list(merged.glob("adapter*"))
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    saved, exact = load_file(merged / "model.safetensors"), load_model(adapter, dtype=torch.float32).state_dict()
    assert saved.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    for name, value in saved.items():
        assert torch.equal(value, exact[name].bfloat16()), name
    merge_adapter(adapter, tmp_path / "other", torch.float32)
    assert load_file(tmp_path / "other" / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    with pytest.raises(UserError, match=r"base: no adapter there \(no adapter_config\.json\)"):
        merge_adapter(tmp_path / "base", tmp_path / "out")
    with pytest.raises(UserError, match="exists and is not empty"):
        merge_adapter(adapter, tmp_path / "base")


def test_companions_come_from_the_adapter_then_from_the_base(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    copy_companions(adapter, first)
    assert {file.name for file in first.iterdir()} == {"tokenizer.json", "tokenizer.model", "generation_config.json"}
    (adapter / "tokenizer.json").write_text("{}")
    copy_companions(adapter, second)
    # The base's other tokenizer file would contradict the adapter's.
    assert {file.name for file in second.iterdir()} == {"tokenizer.json", "generation_config.json"}
    assert (second / "tokenizer.json").read_text() == "{}"


def test_compress_of_an_adapter_is_that_of_the_merged_model(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter")
    merge_adapter(adapter, tmp_path / "merged")
    settings = FactorizeConfig(rank=5)
    summaries = [compress(tmp_path / name, tmp_path / f"{name}-student", settings) for name in ("adapter", "merged")]
    assert summaries[0] == summaries[1]
    students = [load_file(tmp_path / f"{name}-student" / "model.safetensors") for name in ("adapter", "merged")]
    torch.testing.assert_close(*students, rtol=0, atol=0)
    assert (tmp_path / "adapter-student" / "tokenizer.json").is_file()


def test_adapter_of_a_factorized_student(tmp_path: Path) -> None:
    """An adapter that peft saved for the factors is merged into them, and the export multiplies all out."""
    save_adapter(tmp_path / "other")
    compress(tmp_path / "base", tmp_path / "student", FactorizeConfig(rank=5))
    adapter = tmp_path / "adapter"
    settings = PeftConfig(r=2, target_modules=["q_proj.A", "q_proj.B"], init_lora_weights=False)
    model = get_peft_model(load_model(tmp_path / "student", dtype=torch.float32), settings).eval()
    expected = model(TOKENS).logits
    model.save_pretrained(adapter)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "../student"}))
    assert torch.allclose(load_model(adapter, dtype=torch.float32)(TOKENS).logits, expected, atol=1e-5, rtol=0)
    export_dense(adapter, tmp_path / "dense")
    dense = load_model(tmp_path / "dense", dtype="auto", head="saved")
    assert torch.allclose(dense(TOKENS).logits, expected, atol=1e-5, rtol=0)


def test_kronecker_factors_take_no_adapters(tmp_path: Path) -> None:
    save_adapter(tmp_path / "other")
    shapes = {"*.mlp.*": "dense", "*": "4x4"}
    compress(tmp_path / "base", tmp_path / "student", FactorizeConfig(shapes=shapes), "kronecker")
    for targets in (None, ["up_proj", "q_proj"]):
        model = load_model(tmp_path / "student", dtype=torch.float32)
        with pytest.raises(UserError, match=r"0\.self_attn\.q_proj of the student's layers is a Kronecker product"):
            add_lora(model, LoraConfig(rank=2, targets=targets), seed=0)
    add_lora(model, LoraConfig(rank=2, targets=["up_proj"]), seed=0)  # a dense one beside them
    assert sum(hasattr(module, "lora_A") for module in model.modules()) == 2
