"""Question answering through the study that fine-tunes on benchmarks."""

import json
import re

import pytest
import torch
from question_files import rows, write_file, write_tasks
from tiny import tiny_config
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, BertForQuestionAnswering

import llmdistill
from llmdistill.config import FactorizeConfig, StudentConfig
from llmdistill.errors import UserError
from llmdistill.students.convert import compress_folder
from llmdistill.tasks.squad_metrics import squad1_scores, squad2_scores

WINDOWS = {"data.task.stride": 4, "data.task.max_question_length": 4, "data.task.max_answer_length": 4}


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def answer(evaluate, questions):

    def run(*arguments, data=questions, model=None, folder="out", code=0, **more):
        windows = json.dumps({**WINDOWS, **more})
        words = ["--data_dir", data, "--max_length", "14", "--run_settings", windows, "--epochs", "6", *arguments]
        return evaluate(*words, folder=folder, code=code, **({} if model is None else {"model": model}))

    return run


def references(path):
    articles = json.loads(path.read_text())["data"]
    asked = [each for article in articles for paragraph in article["paragraphs"] for each in paragraph["qas"]]
    return {each["id"]: [answer["text"] for answer in each["answers"]] for each in asked}


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_squad2_is_learned_and_its_numbers_are_those_of_its_files(answer, tmp_path) -> None:
    training, files = rows(101, seed=0, unanswerable=True), tmp_path / "data/squad2"
    broken = [row for row in training if row["answers"]][:5]
    for row in broken:
        row["answers"][0]["answer_start"] += 1
    write_file(files / "train-v2.0.json", training)
    write_file(files / "dev-v2.0.json", rows(30, seed=1, unanswerable=True))
    results, _ = answer("--tasks", "squad2", data=files.parent)
    task, run = results["tasks"]["SQuAD2"], tmp_path / "out/SQuAD2/lr-0.01-epochs-6-seed-1"
    predictions = run / "predictions/student/dev"
    right = references(files / "dev-v2.0.json")
    odds, answers = read(predictions, "null_odds"), read(predictions, "predictions")
    scores = squad2_scores(read(predictions, "spans"), odds, right)
    found = {metric: value["mean"] for metric, value in task["dev"]["SQuAD2"].items()}
    assert found == {name: scores[name] for name in ("best_f1", "best_em", "f1", "em")}
    assert task["threshold"]["mean"] == scores["best_f1_threshold"]
    assert {key: text == "" for key, text in answers.items()} == {key: value > 0 for key, value in odds.items()}
    assert task["chance"] == pytest.approx(100 / 3)
    assert scores["f1"] > 80
    assert scores["best_f1"] >= scores["f1"]
    assert task["examples"] == {"train": 96, "dev": 30}
    (warning,) = json.loads((run / "metrics.json").read_text())["warnings"]
    assert warning.startswith("5 training questions are skipped, because their answer is not in the context")
    assert warning.endswith(f"{', '.join(row['id'] for row in broken[:3])} and 2 more")


def test_mlqa_is_learned_in_english_and_scored_in_each_language(answer, questions, tmp_path) -> None:
    results, _ = answer("--tasks", "mlqa", **{"data.task.crossed": True, "data.task.languages": ["en", "de", "zh"]})
    dev = results["tasks"]["MLQA"]["dev"]
    crossed = ["MLQA-en-de", "MLQA-en-zh", "MLQA-de-en", "MLQA-de-zh", "MLQA-zh-en", "MLQA-zh-de"]
    assert list(dev) == ["MLQA-en dev", "MLQA-en", "MLQA-de", "MLQA-zh", *crossed, "MLQA"]
    run = tmp_path / "out/MLQA/lr-0.01-epochs-6-seed-1"
    for language in ("en", "de", "zh"):
        right = references(questions / f"MLQA/test/test-context-{language}-question-{language}.json")
        answers = read(run / f"predictions/student/MLQA-{language}", "predictions")
        by_hand = squad1_scores(answers, right, language=language)
        assert {metric: value["mean"] for metric, value in dev[f"MLQA-{language}"].items()} == by_hand
        for other in (each for each in crossed if each.startswith(f"MLQA-{language}-")):
            assert dev[other] == dev[f"MLQA-{language}"], "the files differ in the names alone"
    mean = sum(dev[f"MLQA-{language}"]["f1"]["mean"] for language in ("en", "de", "zh")) / 3
    assert dev["MLQA"]["f1"]["mean"] == pytest.approx(mean)
    assert results["averages"]["model"]["plain"] == pytest.approx(mean)
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["student"]["score"] == dev["MLQA-en dev"]["f1"]["mean"] > 80


def test_a_student_learns_spans_from_a_teacher(answer, encoder, tmp_path) -> None:
    small, teacher = tmp_path / "small", tmp_path / "teacher"
    answer("--tasks", "squad1", folder="teacher")
    compress_folder(encoder, small, StudentConfig(factorize=FactorizeConfig(rank=8)))
    dense = AutoModelForQuestionAnswering.from_pretrained(teacher / "SQuAD1/best")
    taught = ["--tasks", "squad1", "--teacher", teacher, "--epochs", "1"]
    results, _ = answer(*taught, "--method", "kroneckerbert", model=small)
    task = results["tasks"]["SQuAD1"]
    assert {"embedding", "attention", "ffn", "sequence_logits", "sequence_label"} <= task["terms"].keys()
    assert task["teacher"]["dev"]["SQuAD1"]["f1"] > 80
    best = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out/SQuAD1/best")
    assert "qa_outputs.weight" in best.state_dict()
    assert best.num_parameters() < 0.95 * dense.num_parameters()
    # The head for spans is copied from the teacher.
    _, said = answer(*taught, "--learning_rates", "1e-12", "--copy_classifier", "true", folder="copied")
    assert "the classifier starts as the teacher's" in said
    copied = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "copied/SQuAD1/best")
    assert torch.allclose(copied.qa_outputs.weight, dense.qa_outputs.weight, atol=1e-6)


def test_a_fine_tuned_model_is_scored_by_name(encoder, questions, tmp_path) -> None:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    config = tiny_config("bert", vocab_size=len(tokenizer), max_position_embeddings=80, initializer_range=0.5)
    model = BertForQuestionAnswering(config).train()
    model.config.architectures = ["BertForQuestionAnswering"]
    given = {"tokenizer": tokenizer, "data_dir": questions, "max_length": 80}
    scores = llmdistill.evaluate(model, "squad2", output=tmp_path, **given)
    right = references(questions / "squad2/dev-v2.0.json")
    files = tmp_path / "data/dev"
    expected = squad2_scores(read(files, "spans"), read(files, "null_odds"), right)
    assert scores["official"] == expected
    assert scores["score"] == expected["best_f1"]
    assert model.training
    with pytest.raises(UserError, match=r"data\.max_length is 28: a question may have 64 tokens"):
        llmdistill.evaluate(model, "squad2", **{**given, "max_length": 28})
    with pytest.raises(UserError, match="model is a BertForQuestionAnswering without classifier"):
        llmdistill.evaluate(model, "rte", tokenizer=tokenizer)


def test_bad_input(answer, encoder) -> None:
    for arguments, said in (
        (["--tasks", "squad2", "--tsne", "runs/other"], "t-SNE draws the classes of examples, and SQuAD2 has none"),
        (["--tasks", "squad1", "--max_length", "7"], "data.max_length is 7: a question may have 4 tokens"),
        (["--tasks", "squad1", "--teacher", encoder, "--method", "kd"], "BertForMaskedLM without head for spans"),
    ):
        _, error = answer(*arguments, code=2)
        assert said in re.sub(r"\s+", " ", error)
