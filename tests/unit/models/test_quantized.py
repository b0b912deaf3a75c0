"""Linears of few bits: what they round to, how they learn, and what is saved, loaded, exported and refused."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from plain_engine import PlainEngine
from safetensors.torch import load_file
from tiny import outputs, random_student, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import llmdistill
from llmdistill.batch import Batch
from llmdistill.config.student import QuantizeConfig, StudentConfig
from llmdistill.errors import UserError
from llmdistill.models.forms import saved_size
from llmdistill.models.load import build_meta, load_model
from llmdistill.models.quantized import (
    dequantize,
    fake_quantize,
    pack_int4,
    quantize,
    unpack_int4,
)
from llmdistill.models.rounding import quantized_linears
from llmdistill.models.student_form import SavedSize
from llmdistill.runtime.engine import Template, save_student
from llmdistill.step.not_finite import first_not_finite_parameter
from llmdistill.students.convert import make_student
from llmdistill.students.counting import count_parameters
from llmdistill.tasks.reference_loss import label_loss

pytest.importorskip("torchao")

INT8, INT4 = QuantizeConfig(weights="int8"), QuantizeConfig(weights="int4", group_size=8)
PACKED = QuantizeConfig(weights="int4", group_size=8, packed=True)
EXACT = {"embeddings": "exact"}
BITS = {"int8": replace(INT8, **EXACT), "int4": replace(INT4, **EXACT), "int4 packed": replace(PACKED, **EXACT)}
"""With the embeddings that learned, which is what the linears are compared by."""
FACTORS = {"dense": None, "svd": {"rank": 5}, "pivoted": {"rank": 5, "form": "pivoted"}}
WITH_EMBEDDING = {
    "embedding": {"rank": 5, "embedding_rank": 8},
    "pivoted embedding": {"rank": 5, "embedding_rank": 8, "form": "pivoted"},
    "kronecker embedding": {"shapes": {"*.0.*": "8x4", "*": "dense"}, "embedding_columns": 4},
}
UP = "model.layers.0.mlp.up_proj"


def model_of(kind="llama", factors="dense", *, tied=True):
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    settings = {**FACTORS, **WITH_EMBEDDING}[factors]
    config = tiny_config(kind, tie_word_embeddings=tied)
    model = tiny_model(kind, tie_word_embeddings=tied) if settings is None else random_student(auto, config, settings)
    return model.eval()


def tables(model):
    """The matrices with a row for each token, of the embedding and of the LM head; of a factorized one A."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return getattr(embedding, "A", embedding).weight, getattr(head, "B", head).weight


def column_scales(before, after):
    """The powers of two by which `quantize` divides the columns of a low-rank A, and multiplies the rows of B."""
    embedding = before.get_input_embeddings()
    if not hasattr(embedding, "A") or embedding.B.weight.dim() == 1:
        return torch.ones(())
    scales = after.get_input_embeddings().B.weight / embedding.B.weight
    assert torch.equal(scales, scales[:, :1].expand_as(scales))
    assert torch.equal(scales.log2(), scales.log2().round())
    return scales[:, 0]


def rounded(weight, bits, group):
    """The symmetric integers of each group times its scale, in closed form, and which are the largest of a group.

    The largest is half an integer, so that its rounding hangs on the last bit.
    """
    parts = weight.detach().double().unflatten(1, (-1, group))
    largest = parts.abs().amax(-1, keepdim=True)
    scale = largest / (2**bits - 1) * 2
    integers = (parts / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (integers * scale).flatten(1), (parts.abs() == largest).flatten(1)


@pytest.mark.parametrize(("settings", "bits", "group"), [
    (INT8, 8, 16), (INT4, 4, 8), (QuantizeConfig(weights="int8", group_size=4), 8, 4),
    (QuantizeConfig(weights="int4"), 4, 16),  # groups of 32 do not divide 16 inputs: a scale a row
])  # fmt: skip
def test_weights_round_as_in_closed_form_and_gradients_pass(settings, bits, group):
    model = model_of()
    expected, largest = rounded(model.get_submodule(UP).weight, bits, group)
    converted, learning = copy.deepcopy(model), copy.deepcopy(model)
    quantize(converted, settings)
    fake_quantize(learning, settings)
    found = converted.get_submodule(UP).weight.dequantize()
    difference = (found - expected).abs()
    assert difference[~largest].max() < 1e-6
    assert (difference <= expected.abs() / 2 ** (bits - 1) * 1.2 + 1e-6).all()
    x = torch.randn(3, 16)
    linear = learning.get_submodule(UP)
    y = linear(x)
    assert torch.equal(y, x @ found.T)
    y.pow(2).sum().backward()
    # Straight through: the gradient of the rounded weight is that of the weight itself.
    gradient = 2 * y.detach().T @ x
    assert torch.allclose(linear.weight.grad, gradient, atol=1e-4, rtol=0), "also of the largest, which torchao clips"
    assert (gradient[largest].abs() > 1e-3).any()
    assert not torch.allclose(outputs(converted), outputs(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("factors", FACTORS)
def test_the_linears_of_the_layers_round_and_nothing_else(factors):
    model = model_of(factors=factors)
    before = {name: each.clone() for name, each in model.named_parameters()}
    names = quantized_linears(model)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    assert set(names) == linears
    assert len(names) == (14 if factors == "dense" else 28)
    quantize(model, BITS["int4"])
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert (type(after[name]) is nn.Parameter) == (name.removesuffix(".weight") not in names), name
        if type(after[name]) is nn.Parameter:
            assert torch.equal(after[name], weight)


@pytest.mark.parametrize(("kind", "factors", "tied", "settings"), [
    ("llama", "dense", True, INT8), ("llama", "dense", False, INT4), ("llama", "dense", True, PACKED),
    ("gemma2", "dense", True, INT8), ("gemma3_text", "dense", True, INT8), ("gemma3_text", "dense", True, INT4),
    ("gemma3_text", "svd", True, INT4), ("llama", "svd", True, INT4), ("bert", "dense", True, INT8),
    *((kind, "embedding", True, settings) for kind in ("llama", "gemma3_text", "bert") for settings in (INT8, INT4)),
    ("llama", "embedding", False, INT8), ("llama", "pivoted embedding", True, INT4),
    ("llama", "kronecker embedding", True, INT4), ("bert", "kronecker embedding", True, INT8),
])  # fmt: skip
def test_the_embedding_and_the_head_are_rounded_to_int8_and_stay_tied(tmp_path, kind, factors, tied, settings):
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model = model_of(kind, factors, tied=tied)
    source = copy.deepcopy(model)
    rows, _ = tables(source)
    size = saved_size(count_parameters(model), torch.float32, StudentConfig(quantize=settings), lambda: source)
    quantize(model, settings)
    table, head = tables(model)
    rows = rows / column_scales(source, model)
    expected = rounded(rows, 8, rows.shape[1])[0].nan_to_num(0)  # padding is 0
    # Of a half the last bit decides, and torchao clips the largest.
    step = 2 * rows.abs().amax(1, keepdim=True) / 255
    assert ((table.dequantize() - expected).abs() <= 1.01 * step).all()
    assert (table is head) == tied
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert size.bytes == sum(each.nbytes for each in files.values() if each.dtype != torch.int64)
    loaded = auto.from_pretrained(tmp_path)
    assert torch.equal(outputs(loaded), outputs(model))
    table, head = tables(loaded)
    assert (table is head) == tied
    prompt = {"max_new_tokens": 8, "do_sample": False, "inputs": torch.tensor([[5, 6, 7]])}
    assert kind == "bert" or torch.equal(loaded.generate(**prompt), model.generate(**prompt))
    loaded = load_model(tmp_path, dtype="auto", head="saved")
    assert torch.equal(outputs(loaded), outputs(model))
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name], value) for name, value in files.items())
    half = load_model(tmp_path, dtype=torch.bfloat16, head="saved")
    assert half.dtype == tables(half)[0].dtype == outputs(half).dtype == torch.bfloat16
    batch = Batch(*(torch.arange(3, 12)[None] for _ in range(3)))
    with label_loss(loaded, shift=kind != "bert") as loss_of:
        loss, count = loss_of(replace(batch, attention_mask=torch.ones(1, 9, dtype=torch.int64)))
    with torch.no_grad():
        logits = loaded(input_ids=batch.input_ids).logits[0]
    pairs = (logits[:-1], batch.labels[0, 1:]) if kind != "bert" else (logits, batch.labels[0])
    wanted = nn.functional.cross_entropy(*pairs, reduction="sum")
    assert count == len(pairs[1])
    assert loss == pytest.approx(float(wanted), rel=1e-5)
    dequantize(loaded)
    table, head = tables(loaded)
    assert (table is head) == tied
    assert type(table) is nn.Parameter
    assert torch.allclose(outputs(loaded), outputs(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kind", "factors", "tied"), [
    ("llama", "embedding", True), ("llama", "embedding", False), ("gemma3_text", "embedding", True),
    ("bert", "embedding", True), ("llama", "kronecker embedding", True),
])  # fmt: skip
def test_a_factorized_embedding_computes_with_rows_that_are_rounded_by_hand(kind, factors, tied):
    model = model_of(kind, factors, tied=tied)
    probe = copy.deepcopy(model)
    quantize(probe, INT4)
    scales = column_scales(model, probe)
    embedding = model.get_input_embeddings()
    matrices = {id(matrix): matrix for matrix in tables(model)}
    divisors = {each: scales if matrix is embedding.A.weight else 1 for each, matrix in matrices.items()}
    with torch.no_grad():
        for each, matrix in matrices.items():  # with a positive number as the largest, 127 however it is rounded
            divided = matrix / divisors[each]
            matrix.mul_(divided.gather(1, divided.abs().argmax(1, keepdim=True)).sign())
    found, by_hand, kept = copy.deepcopy(model), copy.deepcopy(model), copy.deepcopy(model)
    quantize(found, INT4)
    for each in (by_hand, kept):
        quantize(each, BITS["int4"])
    with torch.no_grad():
        copies = {id(matrix): matrix for matrix in tables(by_hand)}.values()
        for matrix, divisor in zip(copies, divisors.values(), strict=True):
            matrix.copy_(rounded(matrix / divisor, 8, matrix.shape[1])[0].nan_to_num(0) * divisor)
    assert torch.allclose(outputs(found), outputs(by_hand), atol=1e-5, rtol=0)
    assert (outputs(kept) - outputs(by_hand)).abs().max() > 1e-3
    assert torch.allclose(found.get_input_embeddings().dense(), by_hand.get_input_embeddings().dense(), atol=1e-6)
    head = found.get_output_embeddings()
    of_head = head.weight if tied else head.weight.dequantize()
    assert torch.allclose(of_head, by_hand.get_output_embeddings().weight, atol=1e-6)
    assert all(torch.equal(*pair) for pair in zip(tables(kept), tables(model), strict=True))


def test_singular_values_in_one_factor_do_not_make_the_rounding_coarser():
    model = model_of(factors="embedding")
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.A.weight.copy_(torch.randn(embedding.A.weight.shape) * 4.0 ** -torch.arange(8))
        embedding.A.weight[:, 7] = 0
    exact, small = embedding.dense(), copy.deepcopy(model)
    quantize(small, INT8)
    coarse = rounded(embedding.A.weight, 8, 8)[0].float() @ embedding.B.weight

    def error(table):
        return ((table - exact) @ embedding.B.weight[4]).norm()  # in the direction of a small singular value

    assert error(small.get_input_embeddings().dense()) < 0.1 * error(coarse)
    divided = embedding.A.weight / column_scales(model, small)
    assert torch.equal(divided @ small.get_input_embeddings().B.weight, exact), "powers of two round nothing"


def test_weights_of_few_bits_that_are_not_finite_are_found():
    model = model_of(factors="embedding")
    quantize(model, INT8)
    assert first_not_finite_parameter(model) is None
    model.get_input_embeddings().A.weight.scale[5] = torch.nan
    assert first_not_finite_parameter(model) == "model.embed_tokens.A.weight"


def test_a_scaled_embedding_that_stays_exact_needs_no_llmdistill(tmp_path):
    model = tiny_model("gemma3_text", tie_word_embeddings=True)
    quantize(model, replace(INT8, embeddings="exact"))
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.quant_method == "torchao"
    assert torch.equal(outputs(AutoModelForCausalLM.from_pretrained(tmp_path)), outputs(model))


@pytest.mark.parametrize(("kind", "factors", "bits"), [
    *(("llama", factors, bits) for factors in FACTORS for bits in BITS),
    ("bert", "dense", "int8"), ("bert", "svd", "int4"),
])  # fmt: skip
def test_a_student_is_loaded_as_it_learned(tmp_path, kind, factors, bits):
    model = model_of(kind, factors)
    learning, source = copy.deepcopy(model), tmp_path / "untrained"
    model.save_pretrained(source)
    fake_quantize(learning, BITS[bits])
    expected = outputs(learning)
    template = Template(source, lambda dtype: load_model(source, head="saved", dtype=dtype))
    settings = StudentConfig(quantize=BITS[bits])
    save_student(PlainEngine(learning), tmp_path / "student", template=template, settings=settings)

    loaded = load_model(tmp_path / "student", dtype="auto", head="saved")
    assert torch.equal(outputs(loaded), expected)
    params, weights = count_parameters(model), load_file(tmp_path / "student" / "model.safetensors").values()
    size = saved_size(params, torch.float32, StudentConfig(quantize=BITS[bits]), lambda: model)
    indices = sum(each.nbytes for each in weights if each.dtype == torch.int64)  # of pivots, which are no parameters
    assert size == SavedSize(params=params, bytes=sum(each.nbytes for each in weights) - indices)
    assert count_parameters(loaded) == count_parameters(model)
    loaded.save_pretrained(tmp_path / "again")
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("student", "again")]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items())
    assert saved[0].keys() == saved[1].keys()
    half = load_model(tmp_path / "student", dtype=torch.bfloat16, head="saved")
    assert (outputs(half).float() - expected).abs().max() < 0.05 * expected.abs().max()
    dequantize(loaded)
    assert not hasattr(loaded.config, "quantization_config")
    assert torch.allclose(outputs(loaded), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [INT8, INT4])
def test_a_saved_student_in_bf16_has_the_planned_size(tmp_path, settings):
    model = model_of().bfloat16()
    params = count_parameters(model)
    size = saved_size(
        params, torch.bfloat16, StudentConfig(quantize=settings), lambda: build_meta(model.config, "lm_head")
    )
    quantize(model, settings)
    model.save_pretrained(tmp_path)
    assert size.bytes == sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values()) < 2 * params


def test_two_int4_weights_are_in_a_byte_of_the_file(tmp_path):
    integers = torch.randint(-8, 8, (3, 5), dtype=torch.int8)  # an odd number of them
    assert pack_int4(integers).numel() == 8
    assert torch.equal(unpack_int4(pack_int4(integers), integers.shape), integers)
    for factors, settings, linear, numel, dtype in (
        ("dense", INT4, UP, 384, torch.int8),
        ("dense", PACKED, UP, 192, torch.uint8),
        ("svd", INT4, f"{UP}.A", 5 * 16 // 2, torch.uint8),  # factors are packed unasked
    ):
        model = model_of(factors=factors)
        quantize(model, settings)
        model.save_pretrained(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")[f"{linear}._weight_qdata"]
        assert (stored.numel(), stored.dtype) == (numel, dtype)
        saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert (saved["quant_method"] == "torchao") == (dtype == torch.int8)
        if dtype == torch.int8:  # as stock transformers reads
            stock = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert torch.allclose(outputs(stock), outputs(model), atol=1e-6, rtol=0)


@pytest.mark.parametrize("factors", ["dense", "svd", "embedding"])
def test_exports_round_any_model_and_make_floats_again(tmp_path, factors):
    model = model_of(factors=factors)
    model.save_pretrained(tmp_path / "student")
    (tmp_path / "student" / "README.md").write_text("---\nlicense: mit\n---\n\n# mine\n\n## What it is\n\nA student.\n")
    made = llmdistill.export(tmp_path / "student", tmp_path / "small", to="int4", group_size=8)
    quantize(model, INT4)
    small = load_model(tmp_path / "small", dtype="auto", head="saved")
    assert torch.equal(outputs(small), outputs(model))
    assert made["bytes"] == (tmp_path / "small" / "model.safetensors").stat().st_size
    assert made["params"] == count_parameters(model)
    card = (tmp_path / "small" / "README.md").read_text()
    assert "This is the student, linears in int4, embeddings in int8." in card
    assert "pip install torchao" in card if factors == "dense" else 'pip install -e ".[quantize]"' in card

    with pytest.raises(UserError, match=r"--to int8: .*small has linears in int4 already"):
        llmdistill.export(tmp_path / "small", tmp_path / "smaller", to="int8")
    llmdistill.export(tmp_path / "small", tmp_path / "dense", to="dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert type(dense.get_submodule(UP)) is nn.Linear
    assert torch.allclose(outputs(dense), outputs(model), atol=1e-5, rtol=0)


@pytest.mark.parametrize("factors", ["dense", "embedding"])
def test_a_shape_takes_the_numbers_of_a_rounded_teacher(tmp_path, factors):
    teacher = model_of(factors=factors)
    quantize(teacher, INT8)
    teacher.save_pretrained(tmp_path / "teacher")
    settings = StudentConfig(shape="2x16x4", init="layers")  # all layers
    make_student(tmp_path / "teacher", tmp_path / "student", settings, seed=0, head="lm_head")
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    assert "quantization_config" not in json.loads((tmp_path / "student" / "config.json").read_text())
    assert torch.allclose(outputs(student), outputs(teacher), atol=1e-5, rtol=0)


@pytest.mark.parametrize("factors", ["svd", "pivoted"])
def test_gpt2_whose_loading_reads_products_is_rounded(tmp_path, factors):
    model = random_student(AutoModelForCausalLM, tiny_config("gpt2"), FACTORS[factors]).eval()
    model.save_pretrained(tmp_path / "student")
    llmdistill.export(tmp_path / "student", tmp_path / "small", to="int8")
    quantize(model, INT8)
    small = load_model(tmp_path / "small", dtype="auto", head="saved")
    assert torch.allclose(outputs(small), outputs(model), atol=1e-6)
    factorized = small.transformer.h[0].mlp.c_fc
    assert torch.allclose(
        factorized(torch.eye(factorized.in_features)), factorized.weight.T + factorized.bias, atol=1e-6
    )


@pytest.mark.parametrize(("to", "method"), [("int4", "svd"), ("int8", "pivoted")])
def test_only_an_export_of_four_bits_has_no_pivots(tmp_path, to, method):
    model_of(factors="pivoted").save_pretrained(tmp_path / "student")
    llmdistill.export(tmp_path / "student", tmp_path / "small", to=to)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert (config["method"], config["quantize"]["weights"]) == (method, to)
    load_model(tmp_path / "small", dtype="auto", head="saved")


def test_what_has_no_linears_or_too_many_words_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"GPT2LMHeadModel has no nn.Linear in its layers"):
        fake_quantize(tiny_model("gpt2"), INT4)
    model_of().save_pretrained(tmp_path / "student")
    for to, more, said in (
        ("dense", {"group_size": 8}, "export to='dense': group_size are for 'int8' and 'int4'"),
        ("int4", {"int8": True}, "int8 goes with onnx alone"),
    ):
        with pytest.raises(UserError, match=said):
            llmdistill.export(tmp_path / "student", tmp_path / "out", to=to, **more)
    assert not (tmp_path / "out").exists()
