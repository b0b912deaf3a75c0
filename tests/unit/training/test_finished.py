"""What a finished run leaves, and more steps for it or a stopped one: it goes on from its last checkpoint."""

import json
import shutil
from collections import defaultdict

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from llmdistill.artifacts import as_json
from llmdistill.config import RunConfig, TrainConfig
from llmdistill.config.command_line import to_dict
from llmdistill.files import write_json
from llmdistill.methods import METHODS
from llmdistill.runtime.engine import learning_rate
from llmdistill.train import main
from llmdistill.training import run_folder as artifacts
from llmdistill.training.callbacks.best import read_best

from support import interrupted_copy, log_rows


def test_the_card_tells_the_scores_the_data_and_the_command(finished):
    metrics = json.loads((finished / "metrics.json").read_text())
    card = ModelCard.load(finished / "student" / "README.md")
    trained = next(line for line in card.text.splitlines() if line.startswith("| trained |"))
    assert trained in (finished / "report.md").read_text(encoding="utf-8")
    assert f"{metrics['student']['params']:,}" in trained
    assert "examples" in next(line for line in card.text.splitlines() if line.startswith("- Data:"))
    assert metrics["run"]["versions"]["torch"] in card.text
    assert str(finished.parent) not in (finished / "student" / "README.md").read_text(encoding="utf-8")
    assert "README.md" not in json.loads((finished / "student" / "manifest.json").read_text())["files"]


def test_tensorboard_has_the_figures_of_the_log_and_nothing_else(finished):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found, logged = defaultdict(list), defaultdict(list)
    for file in sorted((finished / "tensorboard").iterdir()):
        for event in loader.LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    for row in log_rows(finished):
        for name in row.keys() - {"step"}:
            logged[f"train/{name}"].append((row["step"], pytest.approx(row[name])))
    assert found == logged


def test_the_first_line_says_which_recipe_is_used(settings, finished, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main([*settings, "--output_dir", str(finished)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "Recipe      none: the defaults of llmdistill, and what the command line says"
    assert others


def test_a_run_of_a_version_that_lacked_some_settings_is_the_same_run(settings, finished, tmp_path, monkeypatch):
    """Each setting that a later version adds has its default in the runs of before."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    record = json.loads((folder / "run.json").read_text())
    methods = {name: entry.settings() for name, entry in METHODS.items() if entry.settings is not None}
    defaults = as_json(to_dict(RunConfig(method_settings=methods)))

    def without(values, usual):
        return {
            key: without(value, usual[key]) if isinstance(value, dict) and value and key in usual else value
            for key, value in values.items()
            if key not in usual or value != usual[key]
        }

    older = record["config"] = without(record["config"], defaults)
    assert "settings" not in older["teacher"]
    assert "kd" not in older
    write_json(folder / "run.json", record)
    student, log = folder / "student/model.safetensors", (folder / "metrics.jsonl").read_bytes()
    made = student.stat().st_mtime_ns
    assert main([*settings, "--output_dir", str(folder)]) == 0
    assert (student.stat().st_mtime_ns, (folder / "metrics.jsonl").read_bytes()) == (made, log), "it trained again"
    assert main([*settings, "--output_dir", str(folder), "--seed", "7"]) == 2


@pytest.fixture
def train(trains):
    """Run the main job in a folder, with an exit code; returns what was said."""

    def run(folder, *more, code=0):
        found, said = trains(folder, *more)
        assert found == code, said
        return said

    return run


def rates(folder):
    return {row["step"]: row["learning_rate"] for row in log_rows(folder) if row["step"] > 0}


def test_a_finished_run_goes_on_with_more_steps(finished, train, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "predictions")
    said = train(run, "--train.steps", "5")
    assert "going on from step 3 of 5, at learning rate" in said
    usual = TrainConfig(steps=5)
    assert rates(run) == {**rates(finished), **{step: learning_rate(usual, step - 1) for step in (4, 5)}}
    assert (run / "predictions/student").is_dir(), "the new student is scored"
    assert json.loads((run / "run.json").read_text())["config"]["train"]["steps"] == 5
    (warning,) = json.loads((run / "metrics.json").read_text())["warnings"]
    assert warning.startswith("train.steps was 3 until step 3, and the run went on with 5: the learning rate")
    assert "train.steps was 3 until step 3" in (run / "report.md").read_text()
    # The same command shows the table; fewer steps are another run.
    assert "going on" not in train(run, "--train.steps", "5")
    assert "train.steps was 5 and is now 4" in train(run, "--train.steps", "4", code=2)
    # Without checkpoints it does not go on.
    shutil.rmtree(run / "checkpoints")
    said = train(run, "--train.steps", "9", code=2)
    assert "train.steps was 5 and is now 9, but" in said
    assert "has no checkpoint to go on from" in said
    assert (run / "student").is_dir()


def test_a_stopped_run_without_an_end_of_its_schedule_ends_as_one_run(train, tmp_path):
    same = ("--train.schedule", "constant", "--scoring.models", "[]")
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(run, *same)
    stopped = interrupted_copy(run, tmp_path / "stopped")
    train(whole, *same, "--train.steps", "4")
    assert "going on from step 2 of 4" in train(stopped, *same, "--train.steps", "4")
    first, second = (load_file(each / "student/model.safetensors") for each in (stopped, whole))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert json.loads((stopped / "metrics.json").read_text())["warnings"] == []
    # A kill after the end is forgotten and before the new steps are noted leaves a run that the old command ends.
    artifacts.forget_end(run)
    train(run, *same)
    assert (run / "student").is_dir()


def test_the_best_student_so_far_stays_one(tmp_path):
    record = {"step": 1, "metric": "loss", "value": 1.0, "student": "best/step-1"}
    write_json(tmp_path / "best.json", record)
    (tmp_path / "student").mkdir()
    (tmp_path / "student" / "weights").write_text("best")
    artifacts.forget_end(tmp_path)
    assert read_best(tmp_path) == record
    assert (tmp_path / "best/step-1/weights").read_text() == "best"
    assert not (tmp_path / "student").exists()
