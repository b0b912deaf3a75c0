import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model

from llmdistill.models.classifier import classifier_parameters, read_classifier, set_classifier

CLASSIFIERS = {
    "bert": {"classifier.weight", "classifier.bias"},
    "roberta": {f"classifier.{part}.{name}" for part in ("dense", "out_proj") for name in ("weight", "bias")},
    "distilbert": {f"{part}.{name}" for part in ("pre_classifier", "classifier") for name in ("weight", "bias")},
    "gpt2": {"score.weight"},
}


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_the_classifier_of_each_family_is_all_outside_the_base(family, tmp_path) -> None:
    names = CLASSIFIERS[family]
    teacher, student = (tiny_model(family, head="sequence", seed=seed, num_labels=3, pad_token_id=0) for seed in (0, 1))
    teacher.save_pretrained(tmp_path)
    student.bfloat16()
    before = {name: parameter.clone() for name, parameter in student.named_parameters()}
    assert classifier_parameters(student).keys() == names
    set_classifier(student, read_classifier(str(tmp_path), "sequence"))
    for name, parameter in student.named_parameters():
        wanted = teacher.get_parameter(name).bfloat16() if name in names else before[name]
        assert torch.equal(parameter, wanted), name


START = ["--tasks", "rte", "--epochs", "1", "--learning_rates", "1e-12"]
"""Learns nothing, so that the classifier stays as it started."""


def classifier(folder):
    return load_file(folder / "RTE/best/model.safetensors")["classifier.weight"]


def test_it_starts_as_the_teacher_s(evaluate, make_encoder, tmp_path) -> None:
    evaluate(*START, "--seeds", "7", folder="teacher")
    teacher = tmp_path / "teacher"
    taught = [*START, "--teacher", teacher]
    results, said = evaluate(*taught, "--method", "kroneckerbert")
    torch.testing.assert_close(classifier(tmp_path / "out"), classifier(teacher))
    assert "the classifier starts as the teacher's" in said
    assert "scores at chance on RTE" in results["warnings"][0]
    assert "Warning: the teacher" in (tmp_path / "out/report.md").read_text()
    _, said = evaluate(*taught, folder="drawn")  # by method kd
    assert (classifier(tmp_path / "drawn") - classifier(teacher)).abs().max() > 1e-3
    assert "starts as the teacher's" not in said
    evaluate(*taught, "--method", "kroneckerbert", "--copy_classifier", "false", folder="no")
    torch.testing.assert_close(classifier(tmp_path / "no"), classifier(tmp_path / "drawn"))
    # It is part of what makes a run the same.
    _, error = evaluate(*taught, "--copy_classifier", "true", folder="drawn", code=2)
    assert "copy_classifier was None and is now True" in error
    # One that cannot be copied is refused.
    _, error = evaluate(*taught, "--copy_classifier", "true", model=make_encoder(width=24), folder="wide", code=2)
    for said in ("classifier.weight 2 x 16", "classifier.weight 2 x 24", "or leave it out"):
        assert said in error
    _, error = evaluate(*START, "--copy_classifier", "true", folder="alone", code=2)
    assert "--copy_classifier true: there is no teacher" in error
