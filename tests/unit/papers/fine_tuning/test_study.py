"""Fine-tuning on tasks: what it finds against the answers on disk, what it keeps, and what it refuses."""

import json
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from scipy.stats import pearsonr
from sklearn.metrics import accuracy_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from llmdistill.errors import UserError
from llmdistill.papers.fine_tuning import run as glue

from support import log_rows

DEV = Path("predictions/student/dev.tsv")
TASKS = ["--tasks", "rte,cola,stsb,mnli", "--seeds", "1,2", "--warmup_ratio", "0.25"]


def answers(file: Path) -> tuple[np.ndarray, np.ndarray]:
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    assert rows[0] == ["index", "prediction", "target"]
    assert [int(row[0]) for row in rows[1:]] == list(range(len(rows) - 1))
    return np.array([float(row[1]) for row in rows[1:]]), np.array([float(row[2]) for row in rows[1:]])


@pytest.fixture(scope="module")
def learned(fine_tune, encoder, data, tmp_path_factory) -> Path:
    """The folder of four tasks with two seeds, with a copy of their files."""
    folder = tmp_path_factory.mktemp("learned")
    shutil.copytree(data, folder / "data")
    assert fine_tune(folder, "--model", encoder, "--data_dir", folder / "data", *TASKS) == 0
    return folder


@pytest.fixture(scope="module")
def results(learned):
    return json.loads((learned / "results.json").read_text())


def runs_of(folder: Path) -> list[Path]:
    return [folder / f"lr-0.01-epochs-4-seed-{seed}" for seed in (1, 2)]


def test_a_task_is_learned_and_its_numbers_are_those_of_its_answers(results, learned) -> None:
    task, runs = results["tasks"]["RTE"], runs_of(learned / "RTE")
    by_hand = [100 * accuracy_score(*reversed(answers(run / DEV))) for run in runs]
    found = task["dev"]["RTE"]["accuracy"]
    assert found["seeds"] == pytest.approx(by_hand)
    assert found["mean"] == pytest.approx(statistics.mean(by_hand))
    assert found["std"] == pytest.approx(statistics.stdev(by_hand))
    targets = answers(runs[0] / DEV)[1]
    assert task["chance"] == pytest.approx(100 * max(targets.mean(), 1 - targets.mean()))
    assert found["mean"] > task["chance"] + 10
    assert len({log_rows(run)[0]["loss"] for run in runs}) == 2, "a seed changes classifier, order and dropout"
    assert not list(learned.rglob("checkpoints"))


def test_the_metrics_of_a_task_are_those_of_its_answers(results, learned) -> None:
    tasks = results["tasks"]
    for task, column, split, metric in (
        ("STS-B", "STS-B", "dev", lambda targets, found: pearsonr(found, targets).statistic),
        ("CoLA", "CoLA", "dev", matthews_corrcoef),
        ("MNLI", "MNLI-m", "dev", accuracy_score),
        ("MNLI", "MNLI-mm", "dev_mismatched", accuracy_score),
    ):
        for number, run in enumerate(runs_of(learned / task)):
            found, targets = answers(run / f"predictions/student/{split}.tsv")
            assert len(found) == (20 if split == "dev_mismatched" else 30)
            value = next(iter(tasks[task]["dev"][column].values()))  # of STS-B Pearson's
            assert value["seeds"][number] == pytest.approx(100 * metric(targets, found))
    assert tasks["STS-B"]["chance"] == 0
    assert json.loads((learned / "STS-B/best/config.json").read_text())["problem_type"] == "regression"
    # MNLI is chosen by its matched split alone.
    assert tasks["MNLI"]["grid"][0]["mean"] == tasks["MNLI"]["dev"]["MNLI-m"]["accuracy"]["mean"]
    assert tasks["MNLI"]["predictions"] == ["predictions/MNLI-m.tsv", "predictions/MNLI-mm.tsv"]
    mains = [tasks[name]["dev"][task["main_column"]][task["metric"]]["mean"] for name, task in tasks.items()]
    assert results["averages"]["model"]["plain"] == pytest.approx(statistics.fmean(mains))
    assert "No test file was there for CoLA, STS-B" in (learned / "report.md").read_text()


def test_the_best_model_is_kept_with_the_task_s_labels(results, learned, data) -> None:
    task, best = results["tasks"]["RTE"], learned / "RTE/best"
    seeds = task["dev"]["RTE"]["accuracy"]["seeds"]
    assert task["best_run"] == f"lr-0.01-epochs-4-seed-{1 + seeds.index(max(seeds))}"
    assert not list(learned.glob("RTE/lr-*/student"))
    model = AutoModelForSequenceClassification.from_pretrained(best).eval()
    tokenizer = AutoTokenizer.from_pretrained(best)
    assert model.config.id2label == {0: "entailment", 1: "not_entailment"}

    def said(split: str) -> list[int]:
        rows = [line.split("\t") for line in (data / f"RTE/{split}.tsv").read_text().splitlines()[1:]]
        return [int(model(**tokenizer(row[1], row[2], return_tensors="pt")).logits.argmax()) for row in rows]

    assert said("dev") == answers(learned / f"RTE/{task['best_run']}" / DEV)[0].tolist()
    # The same model's answers to the test set, in the server's form.
    assert task["predictions"] == ["predictions/RTE.tsv"]
    lines = [f"{index}\t{model.config.id2label[each]}" for index, each in enumerate(said("test"))]
    assert (learned / "predictions/RTE.tsv").read_text().splitlines() == ["index\tprediction", *lines]


def test_what_is_finished_is_kept_and_an_interrupted_run_is_done_again_alone(evaluate, engine, results, learned):
    words, file = ["--data_dir", learned / "data", *TASKS], learned / "data/RTE/dev.tsv"
    text = file.read_text()
    _, error = evaluate(*words, "--limit", "50", folder=learned, code=2)
    assert "it holds a run of another configuration" in error
    assert "data.task.limit was None and is now 50" in error
    file.write_text(text.replace("\tentailment", "\tnot_entailment", 1))
    _, error = evaluate(*words, folder=learned, code=2)
    assert "content of data.task was" in error
    file.write_text(text)
    again, said = evaluate(*words, folder=learned)
    assert engine.built == 0
    assert said.count("on dev (kept)") == 8
    assert {**again, "run": None} == {**results, "run": None}
    run = runs_of(learned / "RTE")[1]
    for rest in ("metrics.json", "metrics.jsonl"):
        (run / rest).unlink()
    shutil.rmtree(run / "scores")
    again, _ = evaluate(*words, folder=learned)
    assert engine.built == 1
    assert again["tasks"]["RTE"]["dev"] == results["tasks"]["RTE"]["dev"], "the seed decides on all"


def test_a_failed_trial_stops_no_other_and_models_are_kept_where_that_is_wanted(evaluate, monkeypatch, tmp_path):
    learn = glue.run_config

    def run(config):
        if config.train.learning_rate == 2e-2:
            raise UserError("the loss is nan at step 3")
        return learn(config)

    monkeypatch.setattr(glue, "run_config", run)
    quick = ("--epochs", "1", "--keep_models", "true")
    results, _ = evaluate("--tasks", "rte", "--learning_rates", "2e-2,1e-2", *quick)
    task = results["tasks"]["RTE"]
    assert task["learning_rate"] == 1e-2
    assert [entry["learning_rate"] for entry in task["grid"]] == [1e-2]
    assert results["warnings"] == ["RTE: lr-0.02-epochs-1-seed-1 failed: the loss is nan at step 3"]
    assert (tmp_path / "out/RTE/lr-0.01-epochs-1-seed-1/student/model.safetensors").is_file()
    assert (tmp_path / "out/RTE/best/model.safetensors").is_file()
    _, error = evaluate("--tasks", "rte", "--learning_rates", "2e-2", folder="none", code=2)
    assert "the loss is nan at step 3; no settings have all their seeds" in error


def test_a_grid_can_grow_and_shrink(evaluate, engine, tmp_path) -> None:
    """A learning rate of 1e-9 learns nothing; a later and better one takes its place."""
    poor, _ = evaluate("--tasks", "rte", "--learning_rates", "1e-9")
    better, _ = evaluate("--tasks", "rte", "--learning_rates", "1e-9,1e-2")
    assert engine.built == 2
    task = better["tasks"]["RTE"]
    assert (task["learning_rate"], task["epochs"]) == (1e-2, 4)
    assert task["grid"][0]["mean"] == poor["tasks"]["RTE"]["grid"][0]["mean"] < task["grid"][1]["mean"]
    assert task["grid"][1]["mean"] == task["dev"]["RTE"]["accuracy"]["mean"]
    kept = json.loads((tmp_path / "out/RTE/best/result.json").read_text())
    assert kept["asked"]["run"] == task["best_run"] != poor["tasks"]["RTE"]["best_run"]
    sent = (tmp_path / "out/predictions/RTE.tsv").read_text()
    # Without it the first choice is right again; its model was dropped, so that one run is repeated.
    again, said = evaluate("--tasks", "rte", "--learning_rates", "1e-9")
    assert engine.built == 3
    assert "its model is gone: once more" in said
    assert again["tasks"]["RTE"]["dev"] == poor["tasks"]["RTE"]["dev"]
    assert (tmp_path / "out/predictions/RTE.tsv").read_text() != sent


def test_a_student_learns_from_fine_tuned_teachers_which_are_scored_once(evaluate, make_encoder, tmp_path, monkeypatch):
    first, _ = evaluate("--tasks", "rte", "--epochs", "6", model=make_encoder(width=24), folder="teacher")
    words = ["--tasks", "rte", "--epochs", "8", "--method", "tinybert", "--also", "kd"]
    words += ["--teacher", tmp_path / "teacher"]
    results, _ = evaluate(*words)
    rows = log_rows(tmp_path / "out/RTE/lr-0.01-epochs-8-seed-1")
    for name in ("hidden", "sequence_forward_kl"):
        assert rows[-1][name] < 0.9 * rows[0][name], name
    task = results["tasks"]["RTE"]
    assert task["teacher"]["score"] == pytest.approx(first["tasks"]["RTE"]["dev"]["RTE"]["accuracy"]["mean"])
    assert task["dev"]["RTE"]["accuracy"]["mean"] > task["chance"] + 10
    assert results["warnings"] == []
    assert not [name for name in load_file(tmp_path / "out/RTE/best/model.safetensors") if "projectors" in name]
    assert list(results["params"]) == ["teacher", "model"]
    monkeypatch.setattr("llmdistill.teachers.live.load_teacher", None)
    assert evaluate(*words)[0]["tasks"] == results["tasks"]


def test_speed_and_sizes_stand_beside_the_baseline_s(evaluate, make_encoder, tmp_path) -> None:
    big = make_encoder(layers=8)
    arguments = ["--tasks", "rte", "--baseline", big, "--speed", "true", "--max_length", "16", "--batch_size", "8"]
    results, _ = evaluate(*arguments, "--epochs", "1")
    assert list(results["params"]) == ["baseline", "model"]
    assert results["params"]["baseline"]["transformer"] == 4 * results["params"]["model"]["transformer"]
    assert results["speed"]["baseline"]["speedup"] == 1
    baseline, model = (results["speed"][role]["throughput"] for role in ("baseline", "model"))
    assert results["speed"]["model"]["speedup"] == pytest.approx(model / baseline)
    assert "sequences/s" in (tmp_path / "out/report.md").read_text()
    assert evaluate(*arguments, "--epochs", "1")[0]["speed"] == results["speed"], "measured once"
