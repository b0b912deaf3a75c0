from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llmdistill.commands.fine_tuning import main
from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.experiments.fine_tuning import run as glue
from llmdistill.factorize.convert import compress

DEV = Path("predictions/student/dev.tsv")
QUICK = ["--protocol", "custom", "--learning_rates", "1e-2", "--epochs", "4", "--batch_size", "16", "--speed", "false"]


@pytest.fixture
def evaluate(capsys, engine, encoder, data, tmp_path):
    """Run the command; gives results.json and what was said."""

    def run(*arguments: str, model: Path = encoder, folder: str = "out", code: int = 0) -> tuple[dict[str, Any], str]:
        output = tmp_path / folder
        given = ["--model", str(model), "--data_dir", str(data), "--output_dir", str(output), *QUICK, *arguments]
        assert main(given) == code
        said = capsys.readouterr()
        results = json.loads((output / "results.json").read_text()) if code == 0 else {}
        return results, said.out + said.err

    return run


def answers(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and targets."""
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    assert rows[0] == ["index", "prediction", "target"]
    assert [int(row[0]) for row in rows[1:]] == list(range(len(rows) - 1))
    return np.array([float(row[1]) for row in rows[1:]]), np.array([float(row[2]) for row in rows[1:]])


def terms(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_task_is_learned_and_its_numbers_are_those_of_its_answers(evaluate, tmp_path) -> None:
    results, said = evaluate("--tasks", "rte", "--seeds", "1,2,3", "--epochs", "2")
    task = results["tasks"]["RTE"]
    runs = [tmp_path / f"out/RTE/lr-0.01-epochs-2-seed-{seed}" for seed in (1, 2, 3)]
    by_hand = [100 * accuracy_score(*reversed(answers(run / DEV))) for run in runs]
    found = task["dev"]["RTE"]["accuracy"]
    assert found["seeds"] == pytest.approx(by_hand)
    assert found["mean"] == pytest.approx(statistics.mean(by_hand))
    assert found["std"] == pytest.approx(statistics.stdev(by_hand))
    targets = answers(runs[0] / DEV)[1]
    assert task["chance"] == pytest.approx(100 * max(targets.mean(), 1 - targets.mean()))
    assert found["mean"] > task["chance"] + 10
    assert len({terms(run)[0]["loss"] for run in runs}) == 3, "a seed changes classifier, order and dropout"
    assert f"{found['mean']:.1f} ± {found['std']:.1f}" in said
    assert not list(tmp_path.rglob("checkpoints"))
    assert (tmp_path / "out/report.md").read_text().count("RTE accuracy") >= 1


def test_the_best_model_is_kept_with_the_task_s_labels(evaluate, data, tmp_path) -> None:
    results, _ = evaluate("--tasks", "rte", "--seeds", "1,2")
    task, best = results["tasks"]["RTE"], tmp_path / "out/RTE/best"
    seeds = task["dev"]["RTE"]["accuracy"]["seeds"]
    assert task["best_run"] == f"lr-0.01-epochs-4-seed-{1 + seeds.index(max(seeds))}"
    assert not list(tmp_path.glob("out/RTE/lr-*/student"))
    model = AutoModelForSequenceClassification.from_pretrained(best).eval()
    tokenizer = AutoTokenizer.from_pretrained(best)
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}
    rows = [line.split("\t") for line in (data / "RTE/dev.tsv").read_text().splitlines()[1:]]
    said = [int(model(**tokenizer(row[1], row[2], return_tensors="pt")).logits.argmax()) for row in rows]
    assert said == answers(tmp_path / f"out/RTE/{task['best_run']}" / DEV)[0].tolist()
    # The same model's answers to the test set, in the server's form.
    assert task["predictions"] == ["predictions/RTE.tsv"]
    tests = [line.split("\t") for line in (data / "RTE/test.tsv").read_text().splitlines()[1:]]
    lines = (tmp_path / "out/predictions/RTE.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    for row, line in zip(tests, lines[1:], strict=True):
        index = int(model(**tokenizer(row[1], row[2], return_tensors="pt")).logits.argmax())
        assert line == f"{row[0]}\t{model.config.id2label[index]}"


def test_a_second_call_runs_nothing_and_says_the_same(evaluate, engine) -> None:
    first, _ = evaluate("--tasks", "rte,cola")
    assert engine.built == 2
    second, said = evaluate("--tasks", "rte,cola")
    assert engine.built == 2
    assert said.count("on dev (kept)") == 2
    for results in (first, second):
        del results["run"]  # of the run too, with its times
    assert first == second


def test_an_interrupted_run_is_done_again_alone(evaluate, engine, tmp_path) -> None:
    whole, _ = evaluate("--tasks", "rte", "--seeds", "1,2")
    run = tmp_path / "out/RTE/lr-0.01-epochs-4-seed-2"
    for rest in ("metrics.json", "metrics.jsonl"):
        (run / rest).unlink()
    shutil.rmtree(run / "student", ignore_errors=True)
    shutil.rmtree(run / "scores")
    again, _ = evaluate("--tasks", "rte", "--seeds", "1,2")
    assert engine.built == 3
    assert again["tasks"]["RTE"]["dev"] == whole["tasks"]["RTE"]["dev"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch_size", "8"], "train.global_batch_size was 16 and is now 8"),
        (["--limit", "50"], "data.task.limit was None and is now 50"),
        (["--weight_decay", "0.5"], "train.weight_decay was 0.01 and is now 0.5"),
    ],
)
def test_a_finished_run_of_other_settings_is_refused(evaluate, engine, arguments, said) -> None:
    evaluate("--tasks", "rte")
    _, error = evaluate("--tasks", "rte", *arguments, code=2)
    assert "it holds a run of another configuration" in error
    assert said in error
    assert "choose another output_dir" in error
    assert engine.built == 1


def test_a_failed_trial_stops_no_other(evaluate, monkeypatch) -> None:
    learn = glue.run_config

    def run(config, world):
        if config.train.learning_rate == 2e-2:
            raise UserError("the loss is nan at step 3")
        return learn(config, world)

    monkeypatch.setattr(glue, "run_config", run)
    results, said = evaluate("--tasks", "rte", "--learning_rates", "2e-2,1e-2", "--seeds", "1,2")
    task = results["tasks"]["RTE"]
    assert task["learning_rate"] == 1e-2
    assert [entry["learning_rate"] for entry in task["grid"]] == [1e-2]
    assert len([line for line in results["warnings"] if "the loss is nan at step 3" in line]) == 2
    assert "RTE: lr-0.02-epochs-4-seed-1 failed: the loss is nan at step 3" in results["warnings"]
    assert "RTE learning_rate=0.02 epochs=4 seed=1: FAILED: the loss is nan at step 3" in " ".join(said.split())
    _, error = evaluate("--tasks", "rte", "--learning_rates", "2e-2", folder="none", code=2)
    assert "the loss is nan at step 3; no settings have all their seeds" in error


def test_other_examples_are_refused(evaluate, data, tmp_path) -> None:
    own = tmp_path / "glue"
    shutil.copytree(data, own)
    evaluate("--tasks", "rte", "--data_dir", str(own))
    file = own / "RTE/dev.tsv"
    file.write_text(file.read_text().replace("\tentailment", "\tnot_entailment", 1))
    assert "content of data.task was" in evaluate("--tasks", "rte", "--data_dir", str(own), code=2)[1]


def test_another_model_is_refused(evaluate, make_encoder) -> None:
    evaluate("--tasks", "rte")
    assert "student.model was" in evaluate("--tasks", "rte", model=make_encoder(width=24), code=2)[1]


def test_the_settings_with_the_best_mean_are_chosen_and_a_grid_can_grow(evaluate, engine, tmp_path) -> None:
    """A learning rate of 1e-9 learns nothing; a later and better one takes its place."""
    poor, _ = evaluate("--tasks", "rte", "--learning_rates", "1e-9,2e-9", "--seeds", "1,2")
    assert engine.built == 4
    assert len(poor["tasks"]["RTE"]["grid"]) == 2
    better, _ = evaluate("--tasks", "rte", "--learning_rates", "1e-9,2e-9,1e-2", "--seeds", "1,2")
    assert engine.built == 6
    task = better["tasks"]["RTE"]
    assert (task["learning_rate"], task["epochs"]) == (1e-2, 4)
    assert [entry["mean"] for entry in task["grid"]][:2] == [entry["mean"] for entry in poor["tasks"]["RTE"]["grid"]]
    assert task["grid"][2]["mean"] == task["dev"]["RTE"]["accuracy"]["mean"] > task["grid"][0]["mean"]
    kept = json.loads((tmp_path / "out/RTE/best/result.json").read_text())
    assert kept["asked"]["run"] == task["best_run"] != poor["tasks"]["RTE"]["best_run"]
    sent = (tmp_path / "out/predictions/RTE.tsv").read_text()
    # Without it the first choice is right again; its model was dropped, so that one run is repeated.
    again, said = evaluate("--tasks", "rte", "--learning_rates", "1e-9,2e-9", "--seeds", "1,2")
    assert engine.built == 7
    assert "its model is gone: once more" in said
    assert again["tasks"]["RTE"]["dev"] == poor["tasks"]["RTE"]["dev"]
    assert (tmp_path / "out/predictions/RTE.tsv").read_text() != sent


def test_models_are_kept_where_that_is_wanted(evaluate, tmp_path) -> None:
    evaluate("--tasks", "rte", "--seeds", "1,2", "--keep_models", "true")
    assert len(list(tmp_path.glob("out/RTE/lr-*/student/model.safetensors"))) == 2
    assert (tmp_path / "out/RTE/best/model.safetensors").is_file()


def test_scores_are_predicted_as_such(evaluate, tmp_path) -> None:
    results, _ = evaluate("--tasks", "stsb", "--epochs", "10")
    task = results["tasks"]["STS-B"]
    predictions, targets = answers(tmp_path / "out/STS-B/lr-0.01-epochs-10-seed-1" / DEV)
    assert task["dev"]["STS-B"]["pearson"]["mean"] == pytest.approx(100 * pearsonr(predictions, targets).statistic)
    assert task["dev"]["STS-B"]["pearson"]["mean"] > 50
    assert task["chance"] == 0
    assert task["predictions"] == []
    config = json.loads((tmp_path / "out/STS-B/best/config.json").read_text())
    assert config["problem_type"] == "regression"


def test_mnli_is_chosen_by_the_matched_split_and_reports_both(evaluate, tmp_path) -> None:
    results, _ = evaluate("--tasks", "mnli,cola")
    task = results["tasks"]["MNLI"]
    run = tmp_path / "out/MNLI/lr-0.01-epochs-4-seed-1"
    for column, split, size in (("MNLI-m", "dev", 30), ("MNLI-mm", "dev_mismatched", 20)):
        predictions, targets = answers(run / f"predictions/student/{split}.tsv")
        assert len(predictions) == size
        assert task["dev"][column]["accuracy"]["mean"] == pytest.approx(100 * accuracy_score(targets, predictions))
    assert task["grid"][0]["mean"] == task["dev"]["MNLI-m"]["accuracy"]["mean"]
    assert task["predictions"] == ["predictions/MNLI-m.tsv", "predictions/MNLI-mm.tsv"]
    predictions, targets = answers(tmp_path / "out/CoLA/lr-0.01-epochs-4-seed-1" / DEV)
    matthews = 100 * matthews_corrcoef(targets, predictions)
    assert results["tasks"]["CoLA"]["dev"]["CoLA"]["matthews"]["mean"] == pytest.approx(matthews)
    plain = (task["dev"]["MNLI-m"]["accuracy"]["mean"] + matthews) / 2
    assert results["averages"]["model"]["plain"] == pytest.approx(plain)
    report = (tmp_path / "out/report.md").read_text()
    assert "MNLI-mm accuracy | CoLA matthews | average of these 2 |" in report
    assert "No test file was there for CoLA" in report


def test_a_factorized_student_is_one_and_stays_one(evaluate, encoder, tmp_path) -> None:
    compress(encoder, tmp_path / "student", FactorizeConfig(rank=6))
    results, _ = evaluate("--tasks", "rte", model=tmp_path / "student")
    dense, _ = evaluate("--tasks", "rte", folder="dense")
    task = results["tasks"]["RTE"]
    assert task["dev"]["RTE"]["accuracy"]["mean"] > task["chance"] + 10
    assert results["params"]["model"]["transformer"] < dense["params"]["model"]["transformer"]
    assert results["params"]["model"]["embedding"] == dense["params"]["model"]["embedding"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out/RTE/best")
    assert sum(p.numel() for p in model.bert.encoder.parameters()) == results["params"]["model"]["transformer"]


@pytest.mark.parametrize(
    ("method", "arguments", "falling"),
    [
        ("kd", ["--kd.ratio", "0.9"], ["sequence_forward_kl"]),
        ("minilmv2", ["--minilmv2.relation_heads", "4"], ["relation_qq", "relation_vv", "sequence_label"]),
        ("tinybert", ["--also", "kd"], ["hidden", "sequence_forward_kl"]),
    ],
)
def test_a_student_learns_from_fine_tuned_teachers(evaluate, make_encoder, tmp_path, method, arguments, falling):
    evaluate("--tasks", "rte", "--epochs", "6", model=make_encoder(width=24), folder="teacher")
    teacher = str(tmp_path / "teacher")
    results, said = evaluate("--tasks", "rte", "--epochs", "8", "--teacher", teacher, "--method", method, *arguments)
    rows = terms(tmp_path / "out/RTE/lr-0.01-epochs-8-seed-1")
    for name in falling:
        assert rows[-1][name] < 0.9 * rows[0][name], name
    task = results["tasks"]["RTE"]
    first = json.loads((tmp_path / "teacher/results.json").read_text())["tasks"]["RTE"]
    assert task["teacher"]["score"] == pytest.approx(first["dev"]["RTE"]["accuracy"]["mean"])
    assert task["dev"]["RTE"]["accuracy"]["mean"] > task["chance"] + 10
    assert results["warnings"] == []
    assert not [name for name in load_file(tmp_path / "out/RTE/best/model.safetensors") if "projectors" in name]
    assert list(results["params"]) == ["teacher", "model"]
    assert f"{task['teacher']['score']:.1f}" in said


def test_a_teacher_at_chance_is_warned_of_and_scored_once(evaluate, tmp_path, monkeypatch) -> None:
    evaluate("--tasks", "rte", "--learning_rates", "1e-9", folder="teacher")
    results, said = evaluate("--tasks", "rte", "--teacher", str(tmp_path / "teacher"))
    assert "scores at chance on RTE" in " ".join(said.split())
    assert "scores at chance on RTE" in results["warnings"][0]
    assert "Warning: the teacher" in (tmp_path / "out/report.md").read_text()
    monkeypatch.setattr("llmdistill.run.assemble.load_teacher", None)
    again, _ = evaluate("--tasks", "rte", "--teacher", str(tmp_path / "teacher"))
    assert again["tasks"] == results["tasks"]


def test_micro_batches_do_not_change_what_is_learned(evaluate, tmp_path, make_encoder) -> None:
    model = make_encoder()
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config))
    quick = ["--tasks", "stsb", "--epochs", "10"]
    evaluate(*quick, model=model, folder="whole")
    evaluate(*quick, "--micro_batch_size", "4", model=model, folder="parts")
    name = "STS-B/lr-0.01-epochs-10-seed-1/predictions/student/dev.tsv"
    whole, parts = (answers(tmp_path / folder / name)[0] for folder in ("whole", "parts"))
    np.testing.assert_allclose(whole, parts, atol=1e-3)
    assert np.ptp(whole) > 1


def test_speed_and_sizes_stand_beside_the_baseline_s(evaluate, encoder, make_encoder, tmp_path) -> None:
    big = make_encoder(layers=8)
    arguments = ["--tasks", "rte", "--baseline", str(big), "--speed", "true", "--max_length", "16", "--batch_size", "8"]
    results, said = evaluate(*arguments)
    assert list(results["params"]) == ["baseline", "model"]
    assert results["params"]["baseline"]["transformer"] == 4 * results["params"]["model"]["transformer"]
    assert results["speed"]["baseline"]["speedup"] == 1
    baseline, model = (results["speed"][role]["throughput"] for role in ("baseline", "model"))
    assert results["speed"]["model"]["speedup"] == pytest.approx(model / baseline)
    assert "speed-up" in said
    assert "sequences/s" in (tmp_path / "out/report.md").read_text()
    assert evaluate(*arguments)[0]["speed"] == results["speed"], "measured once"


def test_the_first_weights_of_the_classifier_follow_from_the_seed(evaluate, tmp_path) -> None:
    evaluate("--tasks", "cola", "--learning_rates", "1e-12", "--seeds", "1,2", "--keep_models", "true", "--epochs", "1")
    evaluate("--tasks", "cola", "--learning_rates", "1e-12", "--seeds", "1", "--epochs", "1", folder="again")

    def classifier(folder: str) -> torch.Tensor:
        return AutoModelForSequenceClassification.from_pretrained(tmp_path / folder).classifier.weight

    first = classifier("out/CoLA/lr-1e-12-epochs-1-seed-1/student")
    assert torch.equal(first, classifier("again/CoLA/best"))
    assert not torch.allclose(first, classifier("out/CoLA/lr-1e-12-epochs-1-seed-2/student"), atol=1e-4)


def test_the_learning_rate_rises_and_falls_linearly(evaluate, data, tmp_path) -> None:
    evaluate("--tasks", "rte", "--warmup_ratio", "0.25")
    rows = terms(tmp_path / "out/RTE/lr-0.01-epochs-4-seed-1")
    steps, warmup = 4 * 6, 6  # 96 examples in batches of 16
    assert [row["step"] for row in rows] == [6, 12, 18, 24]
    for row in rows:
        step = row["step"] - 1
        share = (step + 1) / warmup if step < warmup else 1 - (step - warmup) / (steps - warmup)
        assert row["learning_rate"] == pytest.approx(1e-2 * share)
