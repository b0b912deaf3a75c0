"""A student is a Hugging Face model: saved, loaded, cast, placed, generated from, trained and saved again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import WORDS, random_student, tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.errors import UserError
from llmdistill.factorize import hub
from llmdistill.factorize.counting import count_parameters


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


UNTIED = {"tie_word_embeddings": False}
CASES = {
    **{name: (AutoModelForCausalLM, config_of(name)) for name in ("llama", "qwen3", "gpt2")},
    **{f"{name} untied": (AutoModelForCausalLM, config_of(name, **UNTIED)) for name in ("llama", "gpt2")},
    **{name: (AutoModelForMaskedLM, config_of(name)) for name in ("bert", "distilbert")},
    "bert alone": (AutoModel, config_of("bert")),
    "roberta for classes": (AutoModelForSequenceClassification, config_of("roberta")),
}


@pytest.mark.parametrize(("case", "method", "embedding"), [
    *((case, "svd", True) for case in CASES),
    *((case, method, True) for case in ("llama", "llama untied", "gpt2", "bert") for method in OTHERS),
    *(("llama", method, False) for method in SETTINGS),
])  # fmt: skip
def test_round_trip_is_bit_equal(tmp_path: Path, case: str, embedding: bool, method: str) -> None:
    auto, config = CASES[case]
    student = make_student(auto, config, method, embedding=embedding)
    assert not case.endswith("untied") or type(student.get_output_embeddings()) is torch.nn.Linear
    expected = outputs(student)
    student.save_pretrained(tmp_path / "once")
    loaded, info = auto.from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(outputs(loaded), expected)
    assert count_parameters(loaded) == count_parameters(student)
    assert not getattr(loaded, "is_quantized", False)

    loaded.save_pretrained(tmp_path / "twice", max_shard_size="2KB")
    assert len(list((tmp_path / "twice").glob("*.safetensors"))) > 1
    again = auto.from_pretrained(tmp_path / "twice")
    assert torch.equal(outputs(again), expected)
    assert (tmp_path / "once/config.json").read_text() == (tmp_path / "twice/config.json").read_text()


@METHODS
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_tied_head_shares_the_factors(tmp_path: Path, kind: str, method: str) -> None:
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    student = make_student(auto, config_of(kind), method, embedding=True)
    student.save_pretrained(tmp_path)
    for model in (student, auto.from_pretrained(tmp_path)):
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert head.B.weight is embedding.A.weight
        assert head.A.weight is embedding.B.weight
        # Low-rank (h Bᵀ) Aᵀ, or folded by b and times Aᵀ, is h Eᵀ for the matrix E that the embedding looks up in.
        table = embedding(torch.arange(WORDS))
        hidden = torch.randn(3, 16)
        bias = 0 if head.B.bias is None else head.B.bias
        torch.testing.assert_close(head(hidden), hidden @ table.T + bias)


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


CPU = dict.fromkeys(["model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb", "model.layers.0"], "cpu")
DISK = {"device_map": {**CPU, "model.layers.1": "disk"}, "offload_folder": "offload"}


@pytest.mark.parametrize(("kind", "method", "kwargs"), [
    ("llama", "svd", {"device_map": "auto"}),
    *(("llama", method, DISK) for method in SETTINGS),
    *((kind, method, {"dtype": torch.bfloat16})
      for kind, method in (("llama", "svd"), ("gpt2", "kronecker"), ("llama", "pivoted"))),
])  # fmt: skip
def test_loading_options(tmp_path, monkeypatch, kind, kwargs, method) -> None:
    monkeypatch.chdir(tmp_path)
    student = make_student(AutoModelForCausalLM, config_of(kind), method, embedding=True)
    student.save_pretrained(tmp_path)
    dtype, state = kwargs.get("dtype", torch.float32), torch.get_rng_state()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **kwargs)
    assert torch.equal(torch.get_rng_state(), state), "loading draws no random numbers"
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    for parameter in student.parameters():  # not student.to(): that would also round the rotary frequencies
        parameter.data = parameter.data.to(dtype)
    assert torch.equal(outputs(loaded), outputs(student))


@METHODS
def test_loaded_student_trains_and_casts(tmp_path: Path, method: str) -> None:
    make_student(AutoModelForCausalLM, config_of("llama"), method, embedding=True).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    input_ids = torch.randint(0, WORDS, (2, 8))
    model(input_ids=input_ids, labels=input_ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.half().float().dtype == torch.float32  # transformers refuses both for what it deems quantized


ALONE = """
import itertools
import sys
import transformers
from transformers import AutoConfig, AutoModel, BertForMaskedLM, pipeline
loaders = [
    AutoModel.from_pretrained,
    lambda folder: AutoModel.from_pretrained(folder, config=AutoConfig.from_pretrained(folder)),
    BertForMaskedLM.from_pretrained,
    lambda folder: pipeline("feature-extraction", folder),
]
for folder, load in itertools.product(sys.argv[1:], loaders):
    try:
        load(folder)
    except Exception as error:
        assert "pip install llmdistill, and write `import llmdistill`" in str(error), error
    else:
        raise AssertionError("loaded")
assert not any(name.startswith("llmdistill") for name in sys.modules)
print(len(sys.argv[1:]) * len(loaders))
import llmdistill
AutoModel.from_pretrained(folder)
"""


def test_without_llmdistill_a_student_is_refused_and_after_its_import_loaded(tmp_path: Path) -> None:
    student = make_student(AutoModelForMaskedLM, config_of("bert"), embedding=True)
    student.save_pretrained(tmp_path / "once")
    AutoModelForMaskedLM.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "again")
    # Outside of the checkout, so that llmdistill cannot be imported from it by accident.
    command = [sys.executable, "-c", ALONE, *(str(tmp_path / name) for name in ("once", "again"))]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (["8"], 0), done.stderr[-2000:]


def test_a_config_read_before_the_hook_is_there_loads_the_student(tmp_path: Path) -> None:
    student = make_student(AutoModel, config_of("bert"))
    student.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.transformers_weights == hub.REFUSAL
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path, config=config)), outputs(student))
    assert config.transformers_weights == hub.REFUSAL  # the caller's config is not changed
    assert not hasattr(AutoModel.from_pretrained(tmp_path).config, "transformers_weights")


FIRST_LOAD = """
import sys
import llmdistill
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1])
print(float(sum(parameter.double().sum() for parameter in model.parameters())))
"""


def test_a_bare_import_before_that_of_transformers_loads_students(tmp_path: Path) -> None:
    student = make_student(AutoModel, config_of("bert"), embedding=True)
    student.save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", FIRST_LOAD, tmp_path], check=True, capture_output=True, text=True)
    assert float(done.stdout) == float(sum(parameter.detach().double().sum() for parameter in student.parameters()))


GPT2_LINEARS = [f"h.{layer}.{part}" for layer in (0, 1)
                for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]  # fmt: skip


@pytest.mark.parametrize(("method", "size", "embedding"), [
    ("svd", 5, {"embedding_rank": 8}), ("pivoted", 5, {"embedding_rank": 8}),
    ("kronecker", [8, 4, 2], {"embedding_columns": 4}),
])  # fmt: skip
def test_config_json_is_that_of_students_made_long_ago(tmp_path, method, size, embedding) -> None:
    """Those of the first version had nothing to stop other libraries."""
    student = make_student(AutoModelForCausalLM, config_of("gpt2"), method, embedding=True)
    student.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    modules = dict.fromkeys(GPT2_LINEARS, size)
    assert config["quantization_config"] == {
        "quant_method": "llmdistill", "method": method, "modules": modules, **embedding
    }  # fmt: skip
    del config["transformers_weights"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(student))


@pytest.mark.parametrize(("method", "changes", "word"), [
    ("svd", {"method": "fourier"}, "'fourier'"),
    ("svd", {"modules": {"layers.7.mlp.up_proj": 3}}, "layers.7.mlp.up_proj"),
    ("svd", {"modules": {"layers.0.mlp.up_proj": [8, 4, 2]}}, "svd does not have"),
    ("kronecker", {"modules": {"layers.0.mlp.up_proj": [7, 4, 1]}}, "7 rows does not divide the 24 rows"),
    ("kronecker", {"embedding_columns": 5}, "5 columns do not divide the width 16"),
])  # fmt: skip
def test_foreign_config_is_refused(tmp_path: Path, method: str, changes: dict[str, Any], word: str) -> None:
    make_student(AutoModelForCausalLM, config_of("llama"), method).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=word):
        AutoModelForCausalLM.from_pretrained(tmp_path)
