"""Folders of students of another shape than their teacher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForPreTraining

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.config.student import StudentConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import factorize, make_student
from llmdistill.factorize.modules import KroneckerEmbedding, LowRankEmbedding
from llmdistill.factorize.sizes import plan
from llmdistill.models.importance import measure_importance

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 40}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A teacher's folder with both pretraining heads, in bf16."""
    AutoModelForPreTraining.from_config(tiny_config("bert", **SIZES)).bfloat16().save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher/tokenizer.json").write_text("{}")
    return tmp_path / "teacher"


def make(teacher, output, shape="2x16x2", seed=0, head="lm_head", importance=None, **settings) -> Any:
    make_student(teacher, output, StudentConfig(shape=shape, **settings), seed=seed, head=head, importance=importance)
    return AutoModelForPreTraining.from_pretrained(output) if head == "pretraining" else output


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForMaskedLM.from_pretrained(folder).state_dict()


def test_random_students_follow_the_seed_and_nothing_else(bert: Path, tmp_path: Path) -> None:
    (bert / "model.safetensors").unlink()  # not needed for random weights
    state = torch.get_rng_state()
    make(bert, tmp_path / "a", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    make(bert, tmp_path / "b", seed=3)
    make(bert, tmp_path / "c", seed=4)
    a, b, c = (weights(tmp_path / name) for name in "abc")
    name = "bert.encoder.layer.1.output.dense.weight"
    assert a[name].shape == (16, 32)
    assert a[name].dtype == torch.float32
    assert a[name].std() == pytest.approx(0.02, rel=0.2)
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a[name], c[name])
    assert (tmp_path / "a/tokenizer.json").read_text() == "{}"


def test_weights_of_the_teacher_and_its_heads(bert: Path, tmp_path: Path) -> None:
    teacher: Any = AutoModelForPreTraining.from_pretrained(bert, dtype=torch.float32)
    first = make(bert, tmp_path / "first", "2x32x4", init="layers", layers="first", head="pretraining")
    spread = make(bert, tmp_path / "spread", "2x16x2", init="slice", head="pretraining")
    source = teacher.bert.encoder.layer
    assert torch.equal(first.bert.encoder.layer[1].output.dense.weight, source[1].output.dense.weight)
    assert torch.equal(spread.bert.encoder.layer[1].output.dense.weight, source[2].output.dense.weight[:16, :32])
    assert torch.equal(first.cls.seq_relationship.weight, teacher.cls.seq_relationship.weight)
    assert first.cls.predictions.decoder.weight is first.bert.embeddings.word_embeddings.weight
    assert first.dtype == torch.float32


def test_calibration_data_choose_layers_and_parts(bert: Path, tmp_path: Path) -> None:
    teacher: Any = AutoModelForPreTraining.from_pretrained(bert, dtype=torch.float32)
    with torch.no_grad():
        for name in ("attention.output.dense", "output.dense"):
            teacher.bert.encoder.layer[1].get_submodule(name).weight.zero_()  # a layer that changes little
    teacher.save_pretrained(bert)
    ids = torch.arange(1, 25).view(2, 12)
    importance = measure_importance(teacher, [Batch(input_ids=ids, attention_mask=ids.clamp(max=1), labels=ids)])
    source = teacher.bert.encoder.layer
    deep = make(bert, tmp_path / "deep", "3x32x4", init="layers", layers="important", head="pretraining",
                importance=importance)  # fmt: skip
    for own, theirs in zip(deep.bert.encoder.layer, (source[0], source[2], source[3]), strict=True):
        assert torch.equal(own.output.dense.weight, theirs.output.dense.weight)
    make(bert, tmp_path / "thin", "2x32x4x40", init="important", layers="2,4", importance=importance)
    thin = weights(tmp_path / "thin")
    for own, layer in enumerate((1, 3)):
        best = importance.neurons_LF[layer].topk(40).indices.sort().values
        kept = thin[f"bert.encoder.layer.{own}.output.dense.weight"]
        assert torch.equal(kept, source[layer].output.dense.weight[:, best])


@pytest.mark.parametrize(("method", "size", "kind", "inner"), [
    ("svd", {"embedding_rank": 8}, LowRankEmbedding, 8),
    ("kronecker", {"embedding_columns": 4}, KroneckerEmbedding, 4),
])  # fmt: skip
def test_the_embedding_is_factorized(bert, tmp_path, method, size, kind, inner) -> None:
    settings = {"method": method, "factorize": FactorizeConfig(**size)}
    student = make(bert, tmp_path / "student", head="pretraining", **settings)
    embedding = student.get_input_embeddings()
    assert isinstance(embedding, kind)
    assert embedding.A.weight.shape == (40, inner)
    assert student.cls.predictions.decoder.B.weight is embedding.A.weight
    assert student(input_ids=torch.arange(3, 9).view(1, 6))[0].shape == (1, 6, 40)


def test_a_factorized_teacher_is_multiplied_out(tmp_path: Path) -> None:
    teacher = tiny_model("llama", **SIZES)
    factorize(teacher, plan(teacher, FactorizeConfig(rank=8)))
    teacher.save_pretrained(tmp_path / "teacher")
    make(tmp_path / "teacher", tmp_path / "student", "2x32x4", init="layers")
    student: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "student")
    low_rank: Any = teacher.model.layers[2].mlp.up_proj
    torch.testing.assert_close(student.model.layers[1].mlp.up_proj.weight, low_rank.weight)
    assert not hasattr(student.config, "quantization_config")


@pytest.mark.parametrize(("settings", "expected"), [
    ({"init": "layers", "layers": "middle"}, "student.layers 'middle' names no layers"),
    ({"init": "layers"}, "student.init layers .* width is 16 and the teacher's 32"),
    ({"factorize": FactorizeConfig(embedding_rank=17)}, "embedding_rank 17 does not fit .*, a 40×16 matrix"),
    ({"method": "kronecker", "factorize": FactorizeConfig(embedding_columns=5)}, "5 columns do not divide .* 16"),
])  # fmt: skip
def test_mistakes_leave_no_folder(bert: Path, tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        make(bert, tmp_path / "student", **settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["teacher"]
