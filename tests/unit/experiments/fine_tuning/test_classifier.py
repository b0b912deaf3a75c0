from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
)

from llmdistill.commands.fine_tuning import main
from llmdistill.models.heads import classifier_parameters, read_classifier, set_classifier

SMALL = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
CONFIGS = {
    "bert": (BertConfig(**SMALL, num_labels=3), {"classifier.weight", "classifier.bias"}),
    "roberta": (
        RobertaConfig(**SMALL, num_labels=3),
        {f"classifier.{part}.{name}" for part in ("dense", "out_proj") for name in ("weight", "bias")},
    ),
    "distilbert": (
        DistilBertConfig(dim=8, hidden_dim=16, n_layers=1, n_heads=2, vocab_size=20, num_labels=3),
        {f"{part}.{name}" for part in ("pre_classifier", "classifier") for name in ("weight", "bias")},
    ),
    "gpt2": (GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0), {"score.weight"}),
    "llama": (LlamaConfig(**SMALL, num_labels=3, pad_token_id=0), {"score.weight"}),
}
QUICK = ["--protocol", "custom", "--epochs", "1", "--batch_size", "16", "--speed", "false", "--tasks", "rte"]


@pytest.mark.parametrize("family", CONFIGS)
def test_the_classifier_of_each_family_is_all_outside_the_base(family, tmp_path) -> None:
    config, names = CONFIGS[family]
    teacher = AutoModelForSequenceClassification.from_config(config)
    teacher.save_pretrained(tmp_path)
    student = AutoModelForSequenceClassification.from_config(config).bfloat16()
    before = {name: parameter.clone() for name, parameter in student.named_parameters()}
    assert classifier_parameters(student).keys() == names
    set_classifier(student, read_classifier(str(tmp_path), "sequence"))
    for name, parameter in student.named_parameters():
        wanted = teacher.get_parameter(name).bfloat16() if name in names else before[name]
        assert torch.equal(parameter, wanted), name


@pytest.fixture
def evaluate(capsys, engine, data, tmp_path):
    """Run the command without learning anything; gives the classifier it ends with, and what was said."""

    def run(model: Path, *arguments: str, folder: str = "out", code: int = 0) -> tuple[torch.Tensor | None, str]:
        given = ["--model", str(model), "--data_dir", str(data), "--output_dir", str(tmp_path / folder), *QUICK]
        assert main([*given, "--learning_rates", "1e-12", *arguments]) == code
        said = capsys.readouterr()
        best = tmp_path / folder / "RTE/best/model.safetensors"
        return load_file(best)["classifier.weight"] if code == 0 else None, said.out + said.err

    return run


@pytest.fixture
def teacher(evaluate, encoder, tmp_path) -> str:
    evaluate(encoder, "--seeds", "7", folder="teacher")
    return str(tmp_path / "teacher")


def test_it_starts_as_the_teacher_s(evaluate, encoder, teacher, tmp_path) -> None:
    taught = load_file(Path(teacher) / "RTE/best/model.safetensors")["classifier.weight"]
    copied, said = evaluate(encoder, "--teacher", teacher, "--method", "kroneckerbert")
    torch.testing.assert_close(copied, taught)
    assert "the classifier starts as the teacher's" in said
    asked, _ = evaluate(encoder, "--teacher", teacher, "--copy_classifier", "true", folder="asked")
    torch.testing.assert_close(asked, taught)
    drawn, said = evaluate(encoder, "--teacher", teacher, folder="drawn")  # by method kd
    assert (drawn - taught).abs().max() > 1e-3
    assert "starts as the teacher's" not in said
    refused, _ = evaluate(
        encoder, "--teacher", teacher, "--method", "kroneckerbert", "--copy_classifier", "false", folder="no"
    )
    torch.testing.assert_close(refused, drawn)


def test_it_is_part_of_what_makes_a_run_the_same(evaluate, encoder, teacher, tmp_path) -> None:
    labels = ["--teacher", teacher, "--method", "sft"]
    evaluate(encoder, *labels)
    _, error = evaluate(encoder, *labels, "--copy_classifier", "true", code=2)
    assert "copy_classifier was None and is now True" in error
    evaluate(encoder, "--teacher", teacher, "--copy_classifier", "true", folder="kd")
    _, error = evaluate(encoder, "--teacher", teacher, folder="kd", code=2)
    assert "copy_classifier was True and is now None" in error


def test_a_classifier_of_another_shape_is_refused_where_it_is_asked_for(evaluate, make_encoder, teacher) -> None:
    wide = make_encoder(width=24)
    _, error = evaluate(wide, "--teacher", teacher, "--copy_classifier", "true", code=2)
    assert "classifier.weight 2 x 16" in error
    assert "classifier.weight 2 x 24" in error
    assert "or leave it out" in error
    evaluate(wide, "--teacher", teacher)


def test_there_must_be_a_teacher_to_copy_from(evaluate, encoder) -> None:
    _, error = evaluate(encoder, "--copy_classifier", "true", code=2)
    assert "--copy_classifier true: there is no teacher" in error
