"""Students merged into stock models that need no llmdistill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import random_student, tiny_config
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize import export
from llmdistill.factorize.convert import factorize
from llmdistill.factorize.export import export_dense
from llmdistill.factorize.sizes import plan

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
LLAMA = tiny_config("llama", **SIZES, tie_word_embeddings=True)
GPT2 = tiny_config("gpt2", n_embd=32, vocab_size=96, bos_token_id=0, eos_token_id=0)
BERT, ROBERTA = (tiny_config(name, **SIZES) for name in ("bert", "roberta"))


SETTINGS: dict[str, dict[str, Any]] = {
    "svd": {"rank": 9, "embedding_rank": 20},
    "pivoted": {"rank": 9, "embedding_rank": 20, "form": "pivoted"},
    "kronecker": {"shapes": {"*": "8x4"}, "sums": 2, "embedding_columns": 4},
}
METHODS = pytest.mark.parametrize("method", SETTINGS)


def save_student(folder: Path, auto: Any, config: PreTrainedConfig, dtype=torch.float32, method="svd") -> Any:
    model = random_student(auto, config, SETTINGS[method]).to(dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not a model's file")
    return model


@pytest.mark.parametrize(("auto", "config", "method", "dtype"), [
    (AutoModelForCausalLM, LLAMA, "svd", torch.float32), (AutoModelForCausalLM, LLAMA, "kronecker", torch.bfloat16),
    (AutoModelForCausalLM, GPT2, "pivoted", torch.float32), (AutoModelForCausalLM, GPT2, "kronecker", torch.float32),
    (AutoModelForMaskedLM, ROBERTA, "svd", torch.float32), (AutoModel, BERT, "kronecker", torch.float32),
])  # fmt: skip
def test_an_export_is_a_whole_folder_of_a_stock_model(tmp_path, auto, config, method, dtype) -> None:
    student = save_student(tmp_path / "student", auto, config, dtype, method)
    export_dense(tmp_path / "student", tmp_path / "dense")
    files = {path.name for path in (tmp_path / "dense").iterdir()}
    companions = {"generation_config.json"} if auto is AutoModelForCausalLM else set()
    assert files == {"config.json", "model.safetensors", "tokenizer.json", "manifest.json"} | companions
    written = json.loads((tmp_path / "dense/config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & set(written)
    assert written["dtype"] == str(dtype).removeprefix("torch.")
    model, info = auto.from_pretrained(tmp_path / "dense", dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert not any(type(module).__module__.startswith("llmdistill") for module in model.modules())
    if dtype == torch.float32:  # else the products are rounded
        with torch.no_grad():
            logits, expected = (each(input_ids=torch.arange(3, 19).view(2, 8))[0] for each in (model, student))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


@METHODS
def test_gpt2_gets_its_conv1d_back(method: str) -> None:
    kinds = {name: type(module) for name, module in AutoModelForCausalLM.from_config(GPT2).named_modules()}
    model = random_student(AutoModelForCausalLM, GPT2, SETTINGS[method])
    export.merge(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert Conv1D in kinds.values()
    assert model.lm_head.weight is model.transformer.wte.weight
    # Dense again in every respect: it can be factorized anew.
    factorize(model, plan(model, FactorizeConfig(rank=5)))


def test_wrong_export_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_student(tmp_path / "student", AutoModelForCausalLM, LLAMA)
    product = export._product
    monkeypatch.setattr(export, "_product", lambda module: 1.001 * product(module))
    with pytest.raises(UserError, match="differs from the student"):
        export_dense(tmp_path / "student", tmp_path / "dense")
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


def test_what_is_no_student_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path / "dense")
    with pytest.raises(UserError, match="no factorized student"):
        export_dense(tmp_path / "dense", tmp_path / "out")
    with pytest.raises(UserError, match=r"no such folder"):
        export_dense(tmp_path / "nothing", tmp_path / "out")
