"""A student is a Hugging Face model: saved, loaded, cast, trained and saved again, or exported as a stock model."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from shrunk import shrunk_model
from tiny import WORDS, outputs, random_student, tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from llmdistill import messages
from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.serving.dense import export_dense
from llmdistill.students import hub, merge
from llmdistill.students.convert import compress_model
from llmdistill.students.counting import count_parameters


def config_of(name, **changes):
    return tiny_config(name, **{"tie_word_embeddings": True, **changes})


SETTINGS = {
    "svd": ({"rank": 5}, {"embedding_rank": 8}),
    "pivoted": ({"rank": 5, "form": "pivoted"}, {"embedding_rank": 8}),
    "kronecker": ({"shapes": {"*": "8x4"}, "sums": 2}, {"embedding_columns": 4}),
}
"""By kind: what is done to the linears, and to the token embedding where a test wants it."""


def make_student(auto, config, method="svd", *, embedding=False):
    of_linears, of_embedding = SETTINGS[method]
    return random_student(auto, config, {**of_linears, **(of_embedding if embedding else {})})


def check_tied_head(model):
    """Low-rank (h Bᵀ) Aᵀ, or folded by b and times Aᵀ, is h Eᵀ for the matrix E that the embedding looks up in."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert head.B.weight is embedding.A.weight
    assert head.A.weight is embedding.B.weight
    table, hidden = embedding.dense(), torch.randn(3, 16)
    factor = 16**0.5 if model.config.model_type == "gemma3_text" else 1.0  # the square root of the width
    torch.testing.assert_close(embedding(torch.arange(WORDS)), factor * table)
    torch.testing.assert_close(head(hidden), hidden @ table.T + (0 if head.B.bias is None else head.B.bias))
    torch.testing.assert_close(head.weight, table)
    leaves = [module for module in head.modules() if not list(module.children())]
    assert type(leaves[-1]) is torch.nn.Linear  # what fused losses take over


CASES = {
    **{name: (AutoModelForCausalLM, config_of(name)) for name in ("llama", "gpt2", "gemma3_text")},
    "llama untied": (AutoModelForCausalLM, config_of("llama", tie_word_embeddings=False)),
    "gpt2 untied": (AutoModelForCausalLM, config_of("gpt2", tie_word_embeddings=False)),
    **{name: (AutoModelForMaskedLM, config_of(name)) for name in ("bert", "distilbert")},
    "bert alone": (AutoModel, config_of("bert")),
    "roberta for classes": (AutoModelForSequenceClassification, config_of("roberta")),
}


@pytest.mark.parametrize(("case", "method", "embedding"), [
    *((case, "svd", True) for case in CASES),
    *((case, "pivoted", True) for case in ("llama", "llama untied", "gpt2", "bert")),
    *((case, "kronecker", True) for case in ("llama", "llama untied", "gpt2", "gemma3_text", "bert")),
    ("llama", "kronecker", False),
])  # fmt: skip
def test_a_round_trip_is_bit_equal_and_the_student_trains(tmp_path, case, method, embedding):
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


@pytest.mark.parametrize("method", SETTINGS)
def test_any_head_loads_a_student_of_another(tmp_path, method):
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
@pytest.mark.parametrize("method", SETTINGS)
def test_a_student_is_loaded_in_part_from_the_disk_or_in_another_dtype(tmp_path, monkeypatch, dtype, method):
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


def names_in(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("of_linears", [
    {"ranks": {"*": 4, "*.self_attn.k_proj": 7, "*.mlp.[gf]*": 3}},
    {"ranks": {"*.self_attn.q_proj": 4, "*.self_attn.v_proj": 4, "*.mlp.[uf]*": 4}},  # the others stay dense
    {"shapes": {"*": "8x4", "*.self_attn.k_proj": "4x8", "*.mlp.[gf]*": "4x8"}},
], ids=["ranks", "some dense", "shapes"])  # fmt: skip
@pytest.mark.parametrize("name", ["gte", "jina_embeddings_v3", "nomic_bert", "hrm_text"])
def test_matrices_that_transformers_joins_may_have_factors_of_any_size(tmp_path, name, of_linears):
    teacher = shrunk_model(name)
    auto = AutoModelForCausalLM if name == "hrm_text" else AutoModelForMaskedLM
    teacher.save_pretrained(tmp_path / "teacher")
    model = auto.from_pretrained(tmp_path / "teacher")
    student = compress_model(model, FactorizeConfig(**of_linears), "kronecker" if "shapes" in of_linears else "svd")
    for folder in ("once", "twice"):
        student.save_pretrained(tmp_path / folder)
        loaded, info = auto.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(info.values()), info
        assert torch.equal(outputs(loaded), outputs(student))
        student = loaded
    export_dense(tmp_path / "twice", tmp_path / "dense")
    assert names_in(tmp_path / "dense") == names_in(tmp_path / "teacher")
    torch.testing.assert_close(outputs(auto.from_pretrained(tmp_path / "dense")), outputs(student))


@pytest.mark.parametrize("name", ["gte", "jina_embeddings_v3", "nomic_bert"])
def test_a_student_whose_factors_were_joined_is_loaded_and_saved_apart(tmp_path, name):
    """As students of equal ranks were once saved."""
    student = compress_model(shrunk_model(name), FactorizeConfig(rank=4))
    student._weight_conversions = None
    student.save_pretrained(tmp_path / "joined")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "joined")
    loaded.save_pretrained(tmp_path / "apart")
    assert not names_in(tmp_path / "apart") & {each for each in names_in(tmp_path / "joined") if "qkv" in each.lower()}
    for each in (loaded, AutoModelForMaskedLM.from_pretrained(tmp_path / "apart")):
        assert torch.equal(outputs(each), outputs(student))


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
        assert "pip install -e . in a checkout of llmdistill, and write `import llmdistill`" in str(error), error
    else:
        raise AssertionError("loaded")
assert not any(name.startswith("llmdistill") for name in sys.modules)
import llmdistill
AutoModel.from_pretrained(folder)
print("all")
"""


def test_without_llmdistill_a_student_is_refused_and_after_its_import_before_or_later_loaded(tmp_path):
    student = make_student(AutoModel, config_of("bert"), embedding=True)
    student.save_pretrained(tmp_path / "once")
    AutoModel.from_pretrained(tmp_path / "once").save_pretrained(tmp_path / "again")
    # Outside of the checkout, so that llmdistill cannot be imported from it by accident.
    command = [sys.executable, "-c", ALONE, *(str(tmp_path / name) for name in ("once", "again"))]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    total = float(sum(parameter.detach().double().sum() for parameter in student.parameters()))
    assert done.stdout.split() == [str(total), "all"]


def test_a_config_read_before_the_hook_is_there_loads_the_student(tmp_path):
    student = make_student(AutoModel, config_of("bert"))
    student.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.transformers_weights == hub.REFUSAL
    assert torch.equal(outputs(AutoModel.from_pretrained(tmp_path, config=config)), outputs(student))
    assert config.transformers_weights == hub.REFUSAL  # the caller's config is not changed
    assert not hasattr(AutoModel.from_pretrained(tmp_path).config, "transformers_weights")


@pytest.mark.parametrize(("method", "size"), [("svd", 5), ("pivoted", 5), ("kronecker", [8, 4, 2])])
def test_config_json_is_that_of_students_made_long_ago(tmp_path, method, size):
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
def test_foreign_config_is_refused(tmp_path, method, changes, word):
    make_student(AutoModelForCausalLM, config_of("llama"), method).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=word):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Stock models that need no llmdistill.


@pytest.mark.parametrize(("auto", "name", "method", "dtype"), [
    (AutoModelForCausalLM, "llama", "svd", torch.float32), (AutoModelForCausalLM, "llama", "kronecker", torch.bfloat16),
    (AutoModelForCausalLM, "gpt2", "pivoted", torch.float32), (AutoModelForMaskedLM, "roberta", "svd", torch.float32),
    (AutoModelForCausalLM, "gemma3_text", "svd", torch.float32),
    (AutoModel, "bert", "kronecker", torch.float32),
])  # fmt: skip
def test_an_export_is_a_whole_folder_of_a_stock_model(tmp_path, auto, name, method, dtype):
    student = make_student(auto, config_of(name), method, embedding=True).to(dtype)
    student.save_pretrained(tmp_path / "student")
    (tmp_path / "student/tokenizer.json").write_text("{}")
    (tmp_path / "student/notes.txt").write_text("not a model's file")
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
        expected = outputs(student)
        torch.testing.assert_close(outputs(model), expected, rtol=0, atol=1e-5)
        merge.merge(student)
        torch.testing.assert_close(outputs(student), expected, rtol=0, atol=1e-5)


def test_a_wrong_or_broken_export_is_a_warning(tmp_path, monkeypatch, caplog):
    make_student(AutoModelForCausalLM, config_of("llama")).save_pretrained(tmp_path / "student")
    monkeypatch.setattr(messages.logger, "propagate", True)
    export_dense(tmp_path / "student", tmp_path / "equal")
    assert "is not equal" not in caplog.text
    product = merge._product
    monkeypatch.setattr(merge, "_product", lambda module: -product(module))
    result = export_dense(tmp_path / "student", tmp_path / "other")
    assert (tmp_path / "other" / "model.safetensors").is_file()
    compared = result["comparison"]
    assert compared["changed"] > 0
    assert f"{compared['changed']} of {compared['positions']} greedy tokens change" in caplog.text
    monkeypatch.setattr(merge, "_product", lambda module: float("nan") * product(module))
    caplog.clear()
    broken = export_dense(tmp_path / "student", tmp_path / "broken")["comparison"]
    assert (tmp_path / "broken" / "model.safetensors").is_file()
    assert (broken["positions"], broken["not_finite"]) == (0, compared["positions"])
    assert "outputs of the export are not finite" in caplog.text
