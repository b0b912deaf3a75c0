"""Factorizing loaded weights, in place and from folder to folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import shaken, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM, PreTrainedModel

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import compress, factorize
from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.install import matrix
from llmdistill.factorize.kronecker import KroneckerShape, nearest_kronecker
from llmdistill.factorize.modules import LowRankLinear
from llmdistill.factorize.sizes import plan


def tiny(kind: str) -> PreTrainedModel:
    more = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    more |= {"attention_bias": True, "tie_word_embeddings": True} if kind == "llama" else {}
    return shaken(tiny_model(kind, **({"n_embd": 32, "vocab_size": 96} if kind == "gpt2" else more)))


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=torch.arange(3, 19).view(2, 8))[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_each_module_is_the_nearest_kronecker_product_and_keeps_its_bias(kind: str) -> None:
    teacher = tiny(kind)
    student = copy.deepcopy(teacher)
    planned = plan(student, FactorizeConfig(shapes={"*": "8x4"}, sums=2, embedding_columns=4), "kronecker")
    factorize(student, planned)
    for name, shape in planned.sizes.items():
        dense: Any = teacher.get_submodule(name)
        factorized: Any = student.get_submodule(name)
        a, b = nearest_kronecker(matrix(dense), shape)
        product = sum(torch.kron(one, other) for one, other in zip(a, b, strict=True))
        torch.testing.assert_close(factorized.weight, product, rtol=0, atol=1e-5)
        x = torch.randn(3, product.shape[1])
        bias = 0 if dense.bias is None else dense.bias
        torch.testing.assert_close(factorized(x), x @ product.T + bias, rtol=0, atol=1e-5)
    table = teacher.get_input_embeddings().weight.double()
    a, b = nearest_kronecker(table, KroneckerShape(96, 8))
    torch.testing.assert_close(
        student.get_input_embeddings()(torch.arange(96)).double(), torch.kron(a[0], b[0]), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("kind", "sigma"), [("llama", "left"), ("gpt2", "balanced"), ("bert", "left")])
def test_each_module_is_the_best_approximation_and_keeps_its_bias(kind: str, sigma: Any) -> None:
    teacher = tiny(kind)
    student = copy.deepcopy(teacher)
    ranks = plan(student, FactorizeConfig(rank=5))
    factorize(student, ranks, sigma=sigma)
    x = torch.randn(3, 32)
    for name in ranks.sizes:
        dense, low_rank = teacher.get_submodule(name), student.get_submodule(name)
        assert isinstance(low_rank, LowRankLinear)
        weight = matrix(dense).detach().double().T
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        best = (u[:, :5] * s[:5]) @ vh[:5]
        product = (low_rank.A.weight.T @ low_rank.B.weight.T).detach()
        torch.testing.assert_close(product.double(), best, rtol=0, atol=1e-5)
        # Where Σ sits in A, B's rows have length 1 (MaKD eq. 11).
        lengths = torch.ones(5) if sigma == "left" else s[:5].sqrt().float()
        torch.testing.assert_close(torch.linalg.norm(low_rank.B.weight, dim=0), lengths)
        if weight.shape[0] == 32:
            bias = 0 if dense.bias is None else dense.bias
            torch.testing.assert_close(low_rank(x), x @ best.float() + bias, rtol=0, atol=1e-5)


def test_dtype_is_kept_and_computed_finer() -> None:
    teacher = tiny("llama").to(torch.bfloat16)
    student = copy.deepcopy(teacher)
    factorize(student, plan(student, FactorizeConfig(rank=8, embedding_rank=16)))
    assert {parameter.dtype for parameter in student.parameters()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj"
    weight = matrix(teacher.get_submodule(name)).float().T
    u, s, _ = torch.linalg.svd(weight, full_matrices=False)
    low_rank = student.get_submodule(name)
    # One rounding to bf16 (half of 2⁻⁷) and no more; an SVD in bf16 would be off by far more.
    torch.testing.assert_close(low_rank.A.weight.T.abs().float(), (u * s)[:, :8].abs(), rtol=2**-8, atol=1e-5)


def test_a_config_shared_with_the_teacher_is_left_alone() -> None:
    teacher = tiny("llama")
    student = LlamaForCausalLM(teacher.config)
    assert student.config is teacher.config
    factorize(student, plan(student, FactorizeConfig(rank=4)))
    assert not hasattr(teacher.config, "quantization_config")
    configs = {id(module.config) for module in student.modules() if hasattr(module, "config")}
    assert configs == {id(student.config)}


def test_weights_that_are_not_finite_are_refused_and_nothing_changes() -> None:
    model = tiny("llama")
    ranks = plan(model, FactorizeConfig(rank=4))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down_proj"):
        factorize(model, ranks)
    assert not any(isinstance(module, LowRankLinear) for module in model.modules())


@pytest.mark.parametrize(("kind", "auto"), [("llama", AutoModelForCausalLM), ("bert", AutoModelForMaskedLM)])
def test_compress_from_folder_to_folder(tmp_path: Path, kind: str, auto: Any) -> None:
    teacher = tiny(kind)
    teacher.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher/tokenizer.json").write_text("{}")
    settings = FactorizeConfig(rank=6, embedding_rank=16)
    summary = compress(tmp_path / "teacher", tmp_path / "new/student", settings)
    student = auto.from_pretrained(tmp_path / "new/student")
    factorize(teacher, plan(teacher, settings))
    assert torch.equal(outputs(student), outputs(teacher))
    assert (tmp_path / "new/student/tokenizer.json").read_text() == "{}"
    if kind == "llama":  # counted on the causal LM; an encoder's base model differs from the one with its head
        assert summary["student_params"] == count_parameters(student)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["student"]


def test_compress_names_missing_weights_and_leaves_nothing(tmp_path: Path) -> None:
    config = tiny("llama").config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match="teacher"):
        compress(tmp_path / "teacher", tmp_path / "student", FactorizeConfig(rank=4))
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
