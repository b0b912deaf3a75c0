"""How trials are run: side by side, in this process, failed, interrupted."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from llmdistill.config.command_line import parse_run
from llmdistill.errors import Stopped, UserError
from llmdistill.methods import METHODS
from llmdistill.runtime import signals
from llmdistill.studies.launcher import InProcess, Launcher
from llmdistill.studies.trials import Progress, Trial, last_line, make_trial
from llmdistill.training.run_folder import claim_folder, scoring_settings

pytestmark = pytest.mark.usefixtures("cpu_world")

# A run without torch: it waits some seconds and leaves what the main job does, or fails.
SCRIPT = """
import shutil, sys, time, yaml
from pathlib import Path
config = yaml.safe_load(Path(sys.argv[-1]).read_text())
folder = Path(config["output_dir"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "began").write_text(str(time.time()))
if config["seed"] == 1:
    print("error: out of luck")
    sys.exit(2)
time.sleep({seconds})
shutil.copytree(folder.parents[1] / "left" / folder.name, folder, dirs_exist_ok=True)
(folder / "ended").write_text(str(time.time()))
"""


@pytest.fixture
def trials(tmp_path):
    recipe, _ = parse_run(["--ds_config", "ds_configs/zero2.json", "--data.tests", "{}"], METHODS)
    return [make_trial(tmp_path, recipe, "sft", {"method": "sft", "seed": seed}) for seed in range(3)]


def finish(config):
    with claim_folder(config):
        pass
    metrics = {"asked": scoring_settings(config), "seed": config.seed}
    (Path(config.output_dir) / "metrics.json").write_text(json.dumps(metrics))


@pytest.fixture
def scripted(monkeypatch, tmp_path, trials):

    def make(seconds, **settings):
        for trial in trials:
            finish(trial.config)
            shutil.move(trial.folder, tmp_path / "left" / trial.folder.name)
        script = tmp_path / "job.py"
        script.write_text(SCRIPT.replace("{seconds}", str(seconds)))
        command = lambda self, *words, flags=(): [sys.executable, str(script), words[-1]]  # noqa: E731
        monkeypatch.setattr(Launcher, "command", command)
        return Launcher(**settings)

    return make


def test_a_failed_trial_stops_no_other(scripted, trials, capsys):
    progress = Progress(3, lambda metrics: f"seed {metrics['seed']}")
    results = scripted(0).run(trials, progress)
    assert [result.error is None for result in results] == [True, False, True]
    assert results[1].error == f"out of luck (exit code 2, log {trials[1].log})"
    assert [result.metrics["seed"] for result in (results[0], results[2])] == [0, 2]
    assert all(result.seconds is not None for result in (results[0], results[2]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["[1/3] sft seed=0 ...", "[1/3] sft seed=0: seed 0", "[2/3] sft seed=1 ..."]
    assert lines[3] == f"[2/3] sft seed=1: FAILED: {results[1].error}"
    student = trials[1].folder / "student"
    student.mkdir()
    (student / "config.json").touch()
    began = trials[0].folder / "began"
    before = began.read_text()
    again = Launcher().run(trials, progress)
    assert [result.metrics is not None for result in again] == [True, False, True]
    out = capsys.readouterr().out
    assert "(kept)" in out
    assert "sft seed=1: its student is trained already, and is scored ..." in out
    assert began.read_text() == before


def test_an_interrupted_study_leaves_no_process_behind(scripted, trials):
    launcher = scripted(60, trials_at_once=3)
    before = signal.getsignal(signal.SIGTERM)

    def terminate():
        while not ((trials[0].folder / "began").exists() and (trials[2].folder / "began").exists()):
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    started = []
    real = Launcher._start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "_start", lambda *given: started.append(real(*given)) or started[-1])
        threading.Thread(target=terminate, daemon=True).start()
        with signals.handling(), pytest.raises(Stopped):
            launcher.run(trials)
    assert len(started) == 3
    assert all(run.process.returncode is not None for run in started)
    assert not any((trial.folder / "ended").exists() for trial in trials)
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_process_a_failed_trial_stops_no_other_and_finished_ones_are_kept(trials):
    ran = []

    def train(config):
        ran.append(config.seed)
        if config.seed == 0:
            raise UserError("out of luck")
        if config.seed == 1:
            raise RuntimeError("a mistake")
        finish(config)

    runner = InProcess(train)
    results = runner.run(trials)
    assert ran == [0, 1, 2]
    assert results[0].error == "out of luck"
    assert results[1].error == f"RuntimeError: a mistake (log {trials[1].log})"
    assert "in train" in trials[1].log.read_text()
    assert results[2].metrics["seed"] == 2
    assert runner.run(trials[2:])[0].metrics == results[2].metrics
    assert ran == [0, 1, 2]
    (found,) = InProcess(lambda config: None).run(trials[:1])
    assert found.error == f"it ended without its scores; see {trials[0].log}"


@pytest.mark.parametrize(("written", "shown"), [("", ""), ("step  1\nstep  2\n", "step 2"), ("of 2\n╰──╯\n\n", "of 2")])
def test_a_running_trial_is_shown_by_its_last_line_that_says_something(tmp_path, written, shown):
    log = tmp_path / "trial.log"
    assert last_line(log) == ""
    log.write_text(written, encoding="utf-8")
    assert last_line(log) == shown


class Alone(Trial):
    has_launchers = True


def test_what_has_launchers_of_its_own_gets_none(monkeypatch, trials):
    commands = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    for trial in (trials[0], Alone("alone", {}, 0, trials[0].config)):
        Launcher(("--num_gpus", "2"))._start(trial, ("--num_gpus", "2"))
    (under_launcher, alone), file = commands, str(trials[0].recipe)
    assert Path(under_launcher[0]).name == "deepspeed"
    assert under_launcher[-3:] == ["llmdistill.train", "--recipe", file]
    assert alone == [sys.executable, "-m", "llmdistill.train", "--recipe", file]


def test_gpus_are_shared_out_evenly(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for visible, flags, count, shares in (
        ("", (), 3, ["0,1", "2,3", "4,5"]),
        ("", ("--num_gpus", "4"), 2, ["0,1", "2,3"]),
        ("", ("--num_gpus=2",), 2, ["0", "1"]),
        ("3,5,6", (), 2, ["3", "5"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert Launcher(flags, count)._slots() == [("--include", f"localhost:{share}") for share in shares]
        assert Launcher(flags, 1)._slots() == [flags]
    with pytest.raises(UserError, match=r"--trials_at_once 4: there are 3 GPU\(s\)"):
        Launcher((), 4).check()
    with pytest.raises(UserError, match="--include puts all trials into one place"):
        Launcher(("--include", "localhost:3"), 2).check()
