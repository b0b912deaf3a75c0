"""A student is a Hugging Face model: saved, loaded, cast, trained and saved again, or exported as a stock model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny import WORDS, random_student, tiny_config, tiny_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.config import FactorizeConfig, LoraConfig
from llmdistill.errors import UserError
from llmdistill.factorize import export, hub
from llmdistill.factorize.convert import compress, factorize
from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.export import export_dense
from llmdistill.factorize.sizes import plan
from llmdistill.models.adapters import add_lora
from llmdistill.models.companions import copy_companions
from llmdistill.models.load import load_model, merge_adapter


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    return tiny_config(name, **{"tie_word_embeddings": True, **changes})


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "svd": ({"rank": 5}, {"embedding_rank": 8}),
    "pivoted": ({"rank": 5, "form": "pivoted"}, {"embedding_rank": 8}),
    "kronecker": ({"shapes": {"*": "8x4"}, "sums": 2}, {"embedding_columns": 4}),
}
"""By kind: what is done to the linears, and to the token embedding where a test wants it."""
METHODS = pytest.mark.parametrize("method", SETTINGS)
OTHERS = ("pivoted", "kronecker")


def make_student(auto: Any, config: Any, method: str = "svd", *, embedding: bool = False) -> PreTrainedModel:
    of_linears, of_embedding = SETTINGS[method]
    return random_student(auto, config, {**of_linears, **(of_embedding if embedding else {})})


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    input_ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(input_ids=input_ids.to(model.device))[0]


def check_tied_head(model: PreTrainedModel) -> None:
    """Low-rank (h Bᵀ) Aᵀ, or folded by b and times Aᵀ, is h Eᵀ for the matrix E that the embedding looks up in."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.B.weight is embedding.A.weight
    assert head.A.weight is embedding.B.weight
    table, hidden = embedding.dense(), torch.randn(3, 16)
    torch.testing.assert_close(embedding(torch.arange(WORDS)), table)
    torch.testing.assert_close(head(hidden), hidden @ table.T + (0 if head.B.bias is None else head.B.bias))
    torch.testing.assert_close(head.weight, table)
    leaves = [module for module in head.modules() if not list(module.children())]
    assert type(leaves[-1]) is torch.nn.Linear  # what fused losses take over


UNTIED = {"tie_word_embeddings": False}
CASES = {
    **{name: (AutoModelForCausalLM, config_of(name)) for name in ("llama", "gpt2")},
    **{f"{name} untied": (AutoModelForCausalLM, config_of(name, **UNTIED)) for name in ("llama", "gpt2")},
    **{name: (AutoModelForMaskedLM, config_of(name)) for name in ("bert", "distilbert")},
    "bert alone": (AutoModel, config_of("bert")),
    "roberta for classes": (AutoModelForSequenceClassification, config_of("roberta")),
}


@pytest.mark.parametrize(("case", "method", "embedding"), [
    *((case, "svd", True) for case in CASES),
    *((case, method, True) for case in ("llama", "llama untied", "gpt2", "bert") for method in OTHERS),
    ("llama", "kronecker", False),
])  # fmt: skip
def test_a_round_trip_is_bit_equal_and_the_student_trains(tmp_path: Path, case: str, method: str, embedding) -> None:
    auto, config = CASES[case]
    student = make_student(auto, config, method, embedding=embedding)
    expected = outputs(student)
    student.save_pretrained(tmp_path / "once")
    loaded, info = auto.from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(outputs(loaded), expected)
    assert count_parameters(loaded) == count_parameters(student)
    for model in (student, loaded):
        if case.endswith("untied"):
            assert type(model.get_output_embeddings()) is torch.nn.Linear
        elif embedding and model.get_output_embeddings() is not None:
            check_tied_head(model)

    loaded.save_pretrained(tmp_path / "twice", max_shard_size="2KB")
    assert len(list((tmp_path / "twice").glob("*.safetensors"))) > 1
    again = auto.from_pretrained(tmp_path / "twice")
    assert torch.equal(outputs(again), expected)
    assert (tmp_path / "once/config.json").read_text() == (tmp_path / "twice/config.json").read_text()

    if auto is AutoModelForCausalLM:
        input_ids = torch.randint(0, WORDS, (2, 8))
        loaded(input_ids=input_ids, labels=input_ids).loss.backward()
        assert all(parameter.grad is not None for parameter in loaded.parameters())
    assert loaded.half().float().dtype == torch.float32  # transformers refuses both for what it deems quantized


@METHODS
def test_any_head_loads_a_student_of_another(tmp_path: Path, method: str) -> None:
    masked = make_student(AutoModelForMaskedLM, config_of("bert"), method, embedding=True)
    masked.save_pretrained(tmp_path / "masked")
    base = AutoModel.from_pretrained(tmp_path / "masked", add_pooling_layer=False)
    input_ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        expected = masked.bert(input_ids=input_ids)[0]
        assert torch.equal(base(input_ids=input_ids)[0], expected)
        base.save_pretrained(tmp_path / "base")
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        assert torch.equal(classifier.bert(input_ids=input_ids)[0], expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@METHODS
def test_a_student_is_loaded_in_part_from_the_disk_or_in_another_dtype(tmp_path, monkeypatch, dtype, method) -> None:
    monkeypatch.chdir(tmp_path)
    student = make_student(AutoModelForCausalLM, config_of("llama"), method, embedding=True)
    student.save_pretrained(tmp_path)
    in_memory = ("model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb", "model.layers.0")
    disk = {"device_map": dict.fromkeys(in_memory, "cpu") | {"model.layers.1": "disk"}, "offload_folder": "offload"}
    state = torch.get_rng_state()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **({"dtype": dtype} if dtype else disk))
    assert torch.equal(torch.get_rng_state(), state), "loading draws no random numbers"
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype or torch.float32}
    for parameter in student.parameters():  # not student.to(): that would also round the rotary frequencies
        parameter.data = parameter.data.to(dtype)
    assert torch.equal(outputs(loaded), outputs(student))


ALONE = """
import itertools
import os
import sys
import torch  # once for both processes
if os.fork() == 0:
    import llmdistill  # before transformers
    from transformers import AutoModel
    model = AutoModel.from_pretrained(sys.argv[1])
    print(float(sum(parameter.double().sum() for parameter in model.parameters())))
    sys.exit()
assert os.wait()[1] == 0
from transformers import AutoConfig, AutoModel, BertForMaskedLM
loaders = [
    AutoModel.from_pretrained,
    lambda folder: AutoModel.from_pretrained(folder, config=AutoConfig.from_pretrained(folder)),
    BertForMaskedLM.from_pretrained,
]
for folder, load in itertools.product(sys.argv[1:], loaders):
    try:
        load(folder)
    except Exception as error:
        assert "pip install llmdistill, and write `import llmdistill`" in str(error), error
    else:
        raise AssertionError("loaded")
assert not any(name.startswith("llmdistill") for name in sys.modules)
import llmdistill
AutoModel.from_pretrained(folder)
print("all")
"""


def test_without_llmdistill_a_student_is_refused_and_after_its_import_before_or_later_loaded(tmp_path: Path) -> None:
    student = make_student(AutoModel, config_of("bert"), embedding=True)
    student.save_pretrained(tmp_path / "once")
    AutoModel.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "again")
    # Outside of the checkout, so that llmdistill cannot be imported from it by accident.
    command = [sys.executable, "-c", ALONE, *(str(tmp_path / name) for name in ("once", "again"))]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    total = float(sum(parameter.detach().double().sum() for parameter in student.parameters()))
    assert done.stdout.split() == [str(total), "all"]


def test_a_config_read_before_the_hook_is_there_loads_the_student(tmp_path: Path) -> None:
    student = make_student(AutoModel, config_of("bert"))
    student.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.transformers_weights == hub.REFUSAL
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path, config=config)), outputs(student))
    assert config.transformers_weights == hub.REFUSAL  # the caller's config is not changed
    assert not hasattr(AutoModel.from_pretrained(tmp_path).config, "transformers_weights")


@pytest.mark.parametrize(("method", "size"), [("svd", 5), ("pivoted", 5), ("kronecker", [8, 4, 2])])
def test_config_json_is_that_of_students_made_long_ago(tmp_path, method, size) -> None:
    """Those of the first version had nothing to stop other libraries."""
    student = make_student(AutoModelForCausalLM, config_of("gpt2"), method, embedding=True)
    student.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parts = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    modules = {f"h.{layer}.{part}": size for layer in (0, 1) for part in parts}
    expected = {"quant_method": "llmdistill", "method": method, "modules": modules, **SETTINGS[method][1]}
    assert config["quantization_config"] == expected
    del config["transformers_weights"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(student))


@pytest.mark.parametrize(("method", "changes", "word"), [
    ("svd", {"method": "fourier"}, "'fourier'"),
    ("svd", {"modules": {"layers.7.mlp.up_proj": 3}}, "layers.7.mlp.up_proj"),
    ("svd", {"modules": {"layers.0.mlp.up_proj": [8, 4, 2]}}, "svd does not have"),
    ("kronecker", {"modules": {"layers.0.mlp.up_proj": [7, 4, 1]}}, "7 rows does not divide the 24 rows"),
])  # fmt: skip
def test_foreign_config_is_refused(tmp_path: Path, method: str, changes: dict[str, Any], word: str) -> None:
    make_student(AutoModelForCausalLM, config_of("llama"), method).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=word):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Stock models that need no llmdistill.


def save_student(folder: Path, auto: Any, name: str, dtype=torch.float32, method="svd") -> Any:
    model = make_student(auto, config_of(name), method, embedding=True).to(dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not a model's file")
    return model


@pytest.mark.parametrize(("auto", "name", "method", "dtype"), [
    (AutoModelForCausalLM, "llama", "svd", torch.float32), (AutoModelForCausalLM, "llama", "kronecker", torch.bfloat16),
    (AutoModelForCausalLM, "gpt2", "pivoted", torch.float32), (AutoModelForMaskedLM, "roberta", "svd", torch.float32),
    (AutoModel, "bert", "kronecker", torch.float32),
])  # fmt: skip
def test_an_export_is_a_whole_folder_of_a_stock_model(tmp_path, auto, name, method, dtype) -> None:
    student = save_student(tmp_path / "student", auto, name, dtype, method)
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
        torch.testing.assert_close(outputs(model), outputs(student), rtol=0, atol=1e-5)


def test_gpt2_is_dense_again_in_every_respect() -> None:
    stock = AutoModelForCausalLM.from_config(config_of("gpt2"))
    kinds = {name: type(module) for name, module in stock.named_modules()}
    model = make_student(AutoModelForCausalLM, stock.config, embedding=True)
    export.merge(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert model.lm_head.weight is model.transformer.wte.weight
    factorize(model, plan(model, FactorizeConfig(rank=5)))


def test_wrong_export_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_student(tmp_path / "student", AutoModelForCausalLM, "llama")
    product = export._product
    monkeypatch.setattr(export, "_product", lambda module: 1.001 * product(module))
    with pytest.raises(UserError, match="differs from the student"):
        export_dense(tmp_path / "student", tmp_path / "dense")
    assert [path.name for path in tmp_path.iterdir()] == ["student"]


# Folders of adapters.


def beside_its_base(model: PeftModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "../base"}))
    return folder


def save_adapter(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A random adapter in `folder`, its base beside it, with files of both that are no weights."""
    base = folder.parent / "base"
    tiny_model("llama").to(dtype).save_pretrained(base)
    settings = PeftConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    beside_its_base(get_peft_model(load_model(base, dtype=torch.float32), settings), folder)
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json"):
        (base / name).write_text(f'{{"of": "base {name}"}}')
    return folder


def test_a_merged_folder_is_a_stock_model_and_compress_merges_too(tmp_path: Path) -> None:
    adapter, merged = save_adapter(tmp_path / "adapter", torch.bfloat16), tmp_path / "merged"
    merge_adapter(adapter, merged)
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

    names = ("adapter", "merged")
    one, other = (compress(tmp_path / name, tmp_path / f"{name}-made", FactorizeConfig(rank=5)) for name in names)
    assert one == other
    students = [load_file(tmp_path / f"{name}-made" / "model.safetensors") for name in names]
    torch.testing.assert_close(*students, rtol=0, atol=0)
    assert (tmp_path / "adapter-made" / "tokenizer.json").is_file()


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


def test_adapter_of_a_factorized_student(tmp_path: Path) -> None:
    """An adapter that peft saved for the factors is merged into them, and the export multiplies all out."""
    random_student(AutoModelForCausalLM, tiny_config("llama"), {"rank": 5}).save_pretrained(tmp_path / "base")
    settings = PeftConfig(r=2, target_modules=["q_proj.A", "q_proj.B"], init_lora_weights=False)
    model = get_peft_model(load_model(tmp_path / "base", dtype=torch.float32), settings).eval()
    adapter = beside_its_base(model, tmp_path / "adapter")
    export_dense(adapter, tmp_path / "dense")
    for folder in (adapter, tmp_path / "dense"):
        loaded = load_model(folder, dtype=torch.float32)
        torch.testing.assert_close(outputs(loaded), outputs(model), atol=1e-5, rtol=0)


def test_kronecker_factors_take_no_adapters() -> None:
    settings = {"shapes": {"*.mlp.*": "dense", "*": "4x4"}}
    model = random_student(AutoModelForCausalLM, tiny_config("llama"), settings)
    for targets in (None, ["up_proj", "q_proj"]):
        with pytest.raises(UserError, match=r"0\.self_attn\.q_proj of the student's layers is a Kronecker product"):
            add_lora(model, LoraConfig(rank=2, targets=targets), seed=0)
    add_lora(model, LoraConfig(rank=2, targets=["up_proj"]), seed=0)  # a dense one beside them
    assert sum(hasattr(module, "lora_A") for module in model.modules()) == 2
