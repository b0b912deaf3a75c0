import json
import shutil
import sys
from unittest.mock import Mock

import pytest
from planted import plant

from llmdistill import cli
from llmdistill.commands import worker
from llmdistill.commands.fine_tuning import main
from llmdistill.config.command_line import build
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.methods import METHODS
from llmdistill.papers.fine_tuning import run
from llmdistill.papers.fine_tuning.run import FineTuning

CUSTOM = ["--protocol", "custom", "--learning_rates", "1e-2", "--epochs", "1", "--speed", "false", "--limit", "32"]


def test_a_suite_of_evaluate_puts_its_result_alone_on_stdout(capsys, engine, encoder, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--model", str(encoder), "--data_dir", str(data), "--tasks", "cola", *CUSTOM]
    assert cli.main(["evaluate", *given, "--suite", "glue"]) == 0
    assert "CoLA matthews" in " ".join(capsys.readouterr().out.split())
    (report,) = tmp_path.glob("runs/glue/*/report.md")
    assert "llmdistill evaluate --suite glue --model" in report.read_text()
    assert main([*given, "--json"], prog="eval/glue.py") == 0
    said = capsys.readouterr()
    results = json.loads(said.out)
    assert results == json.loads(report.with_name("results.json").read_text())
    assert results["tasks"]["CoLA"]["examples"]["train"] == 32  # of 64
    assert results["run"]["command"].startswith("eval/glue.py --model")
    assert "[1/1] CoLA learning_rate=0.01 epochs=1 seed=1: matthews" in said.err


def test_several_ranks_are_the_launcher_s(monkeypatch) -> None:
    start = Mock(side_effect=SystemExit)
    monkeypatch.setattr(cli, "run_ranks", start)
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--suite=glue", "--num_gpus", "2", "--model", "m"])
    module = [sys.executable, "-u", "-m", "llmdistill.cli"]
    start.assert_called_once_with([*module, "evaluate", "--suite=glue", "--model", "m"], 2)


def test_mistakes_are_one_sentence(evaluate, engine) -> None:
    for arguments, said in (
        (["--tasks", "rta"], "did you mean rte?"),
        (["--tasks", "wnli"], "it has no folder WNLI"),
        (["--method", "kd"], "method kd needs a teacher"),
        (["--also", "kd"], "method sft has no teacher"),
        (["--run_settings", '{"data.task.metric": "f1"}'], "data.task.metric is f1: RTE has accuracy; name one of"),
        (["--teacher", "t", "--method", "minilmv2", "--minilmv2.teacher_layer", "auto"], "name a layer"),
        (["--teacher", "nowhere/at/all", "--tasks", "rte,cola"], "one model, but 2 tasks"),
        (["--batch_size", "6", "--micro_batch_size", "4"], "train.global_batch_size 6 does not divide by"),
    ):
        _, error = evaluate("--tasks", "rte", *CUSTOM, *arguments, code=2)
        assert error.startswith("error: ") or "\nerror: " in error
        assert said in error
        assert "Traceback" not in error
    assert engine.built == 0


def test_fine_tuning_runs_no_code_of_the_model_and_the_folders_it_reads(
    fine_tune, encoder, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker, output = tmp_path / "code ran", tmp_path / "out"
    for source in (encoder, data):
        shutil.copytree(source, tmp_path / source.name)
        plant(tmp_path / source.name, marker)
    model, rows = (str(tmp_path / source.name) for source in (encoder, data))
    words = ["--model", model, "--data_dir", rows, "--epochs", "1", "--tasks", "rte"]
    # Again over its own planted folder, which still counts as what it was, and then over a model that is another.
    for codes, named in (((0,), False), ((0,), True), ((0, 2), True)):
        code, said = fine_tune(output, *words), capsys.readouterr().err
        assert code in codes, said
        assert code == 0 or said.count("error: ") == 1
        assert "Traceback" not in said
        assert not marker.exists()
        plant(output, marker, named=named)


def test_a_study_s_fine_tuning_has_its_settings_from_a_file(tmp_path, monkeypatch):
    grid = {"learning_rates": [1e-5], "seeds": [7], "out_of_domain": {"HANS": {}}, "run_settings": {"train.fp32": 1}}
    settings = {**grid, "tasks": ["rte"], "model": "m", "output_dir": str(tmp_path / "row"), "trials_at_once": 2}
    config = build(settings, FineTuningConfig, METHODS)
    trial = FineTuning("row", {}, 0, config, launcher_flags=("--num_gpus", "4"))
    trial.write()
    given = []
    monkeypatch.setattr(run, "run", lambda config, **more: given.append((config, more)))
    assert worker.main([str(tmp_path / "row.yaml")]) == 0
    ((found, more),) = given
    assert found == config
    assert (trial.has_launchers, more["launcher_flags"]) == (True, ["--num_gpus", "4"])
    assert more["command"] == f"python -m llmdistill.commands.worker {tmp_path / 'row.yaml'}"
