"""Zero-shot tasks of lm-evaluation-harness, on a task of our own, against plain torch."""

import importlib
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from planted import plant
from tiny import tiny_config

import llmdistill
from llmdistill.commands.side_by_side import main
from llmdistill.embedded import locate
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.trials import read_trials
from llmdistill.studies.zero_shot import make_table
from llmdistill.tasks.zero_shot import is_share, main_metric

TASK = """
{{task: ages, dataset_path: json, dataset_kwargs: {{data_files: {{test: {data}}}}}, test_split: test,
output_type: multiple_choice, doc_to_text: "{{{{question}}}}", doc_to_target: answer, doc_to_choice: choices,
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]}}
"""

QUESTIONS = [
    {"question": f"{name} is a", "choices": ["baker from Tarn.", "sailor.", "red house"], "answer": number % 3}
    for number, name in enumerate(["Ada", "Bo", "Cleo", "Dov", "Elin", "Finn", "Gus", "Hana", "Ivo"])
]


@pytest.fixture
def task_dir(tmp_path, monkeypatch):
    """A folder with the task `ages`, and a cache of data sets of its own."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "ages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS), encoding="utf-8")
    (folder / "ages.yaml").write_text(TASK.format(data=folder / "ages.jsonl"), encoding="utf-8")
    return folder


@pytest.fixture
def run(tmp_path):
    """A folder as a finished run leaves it: its teacher is the embedded one, and its students are of two ranks."""
    for name, rank in (("untrained", 4), ("student", 24)):
        llmdistill.compress("embedded:teacher", rank=rank, output=str(tmp_path / "run" / name))
    config = {"teacher": {"model": "embedded:teacher"}, "student": {"model": None}}
    (tmp_path / "run/run.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    (tmp_path / "run/metrics.json").write_text("{}", encoding="utf-8")
    return tmp_path / "run"


@torch.no_grad()
def shares(model_path):
    """The shares of questions whose right choice has the largest log-likelihood, in all and per byte, one by one."""
    model, tokenizer = load_model(model_path, dtype=torch.float32), load_tokenizer(model_path)
    right = np.zeros(2)
    for row in QUESTIONS:
        start, sums = len(tokenizer(row["question"])["input_ids"]), []
        for choice in row["choices"]:
            ids = torch.tensor(tokenizer(f"{row['question']} {choice}")["input_ids"])
            logs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
            sums.append(float(logs[start - 1 :].sum()))
        means = np.array(sums) / [len(choice) for choice in row["choices"]]
        right += [np.argmax(each) == row["answer"] for each in (sums, means)]
    return right / len(QUESTIONS)


def test_the_models_of_a_run_are_scored_side_by_side(task_dir, run, capsys):
    command = ["--model", str(run), "--tasks", "ages", "--task_dir", str(task_dir), "--dtype", "fp32"]
    assert main("zero_shot", command) == 0
    results = json.loads((run / "zero_shot" / "results.json").read_text(encoding="utf-8"))
    paths = {"teacher": locate("embedded:teacher"), "untrained": run / "untrained", "trained": run / "student"}
    assert list(results["models"]) == list(paths)
    for name, path in paths.items():
        entry = results["models"][name]["tasks"]["ages"]
        acc, acc_norm = shares(path)
        assert entry["metrics"] == pytest.approx({"acc": acc, "acc_norm": acc_norm})
        assert (entry["examples"], entry["num_fewshot"]) == (len(QUESTIONS), 0)
    assert len({model["params"] for model in results["models"].values()}) == 3
    for row in read_trials(run / "zero_shot"):
        entry, model = row.models[row.row], results["models"][row.row]
        assert (entry.params, entry.by_set("acc")["ages"]) == (
            model["params"],
            model["tasks"]["ages"]["metrics"]["acc"],
        )
    capsys.readouterr()
    # A model that has changed is scored again, and no other.
    shutil.rmtree(run / "student")
    shutil.copytree(run / "untrained", run / "student")
    assert main("zero_shot", command) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "on ages" in line] == ["trained"]


def test_limits_reach_the_harness_and_code_in_the_folders_of_models_does_not_run(task_dir, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    plant(run, tmp_path / "code ran")
    command = ["--model", f"mine={run}", "--tasks", "ages", "--task_dir", str(task_dir), "--limit", "4"]
    assert main("zero_shot", [*command, "--num_fewshot", "2", "--output_dir", str(tmp_path / "out")]) == 0
    assert not (tmp_path / "code ran").exists()
    results = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    entry = results["models"]["mine"]["tasks"]["ages"]
    assert (entry["examples"], entry["num_fewshot"], results["limit"]) == (4, 2, 4)


def test_mistakes_are_told_before_a_model_is_loaded(task_dir, run, tmp_path, refused, monkeypatch):
    # The harness indexes its own thousands of tasks for seconds, and none of them is named alike.
    managers = importlib.import_module("lm_eval.tasks")
    monkeypatch.setattr(managers, "TaskManager", partial(managers.TaskManager, include_defaults=False))
    tiny_config("bert").save_pretrained(tmp_path / "encoder")
    whole = {"--model": "embedded:teacher", "--tasks": "ages", "--task_dir": task_dir}
    for change, said in (
        ({"--tasks": "agse"}, "has no task 'agse'; did you mean ages?"),
        ({"--task_dir": tmp_path / "none"}, "no such folder"),
        ({"--model": tmp_path / "encoder"}, "is an encoder"),
        ({"--model": f"{run},{run / 'student'},{run}"}, "each once"),
        ({}, "the data are not loaded"),
    ):
        if not change:
            (task_dir / "ages.jsonl").unlink()
        assert said in refused("zero_shot", *(word for pair in {**whole, **change}.items() for word in pair))


def test_a_table_shows_one_metric_of_each_task_and_the_mean_of_shares() -> None:
    tasks = {
        "arc": {"metrics": {"acc": 0.25, "acc_norm": 0.5}, "stderr": {"acc_norm": 0.01}},
        "boolq": {"metrics": {"acc": 0.75}, "stderr": {}},
        "wikitext": {"metrics": {"word_perplexity": 21.5}, "stderr": {}},
    }
    results = {"models": {"teacher": {"params": 1200, "tasks": tasks}}, "num_fewshot": 5, "limit": 9}
    _, header, rows = make_table(results)
    assert header == ["", "params", "arc acc_norm", "boolq acc", "wikitext word_perplexity", "average"]
    assert rows == [["teacher", "1,200", "50.0 ± 1.0", "75.0", "21.500", "62.5"]]
    assert main_metric({"f1": 1.0, "acc": 0.5}) == "acc"
    assert is_share("exact_match (strict)")
    assert not is_share("bleu")
