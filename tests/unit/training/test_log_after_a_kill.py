"""The log of a run is the same whether it was killed, stopped or neither: what a row adds up is in a checkpoint."""

import json
import math
import shutil
import signal

import pytest

from llmdistill.training.callbacks import saving
from llmdistill.training.callbacks.loss_watch import LossWatch
from llmdistill.training.callbacks.stopping import Stopping

STEPS = 7
TIMES = {"tokens_per_second", "teacher_share", "peak_memory_bytes"}
LOGGED = [
    *("--train.steps", str(STEPS), "--train.log_every", "3", "--train.keep_checkpoints", "9", "--method", "makd"),
    *("--scoring.models", "[]", "--train.validate_every", "5"),
]


def rows(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["tokens_per_second"] > 0 for row in found if "loss" in row)
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


@pytest.fixture
def whole(base, trains, monkeypatch, tmp_path):
    """A run that nothing interrupts, and the folder that a kill after each step would have left."""
    save = saving.save_checkpoint

    def save_and_copy(engine, folder, step, *rest, **named):
        save(engine, folder, step, *rest, **named)
        if folder == tmp_path / "run":
            shutil.copytree(folder, tmp_path / f"killed-{step}")

    monkeypatch.setattr(saving, "save_checkpoint", save_and_copy)
    code, said = trains(tmp_path / "run", *LOGGED)
    assert code == 0, said
    return tmp_path / "run"


@pytest.mark.parametrize("kills", [(2, 4), pytest.param((1, 3, 5, 6), marks=pytest.mark.slow)])
def test_rows_are_those_of_an_uninterrupted_run(whole, trains, tmp_path, monkeypatch, kills):
    expected = rows(whole)
    assert [row["step"] for row in expected] == [3, 5, 6, 7]
    for step in kills:
        killed = tmp_path / f"killed-{step}"
        code, said = trains(killed, *LOGGED)
        assert code == 0, said
        assert rows(killed) == expected, step
    manifest = tmp_path / "killed-1" / "checkpoints" / "step-1" / "manifest.json"
    if 1 not in kills:  # of an earlier version, which kept no figures
        content = json.loads(manifest.read_text())
        del content["figures"]
        manifest.write_text(json.dumps(content))
        code, said = trains(tmp_path / "killed-1", *LOGGED)
        assert code == 0, said
        assert [row["step"] for row in rows(tmp_path / "killed-1")] == [3, 5, 6, 7]
    stopped, look = tmp_path / "stopped", Stopping.after_step

    def stop(self, state):
        look(self, state)
        state.signal = signal.SIGTERM if state.step == 2 else 0

    with monkeypatch.context() as patch:
        patch.setattr(Stopping, "after_step", stop)
        assert trains(stopped, *LOGGED, "--train.save_every", "50")[0] == 143
    assert trains(stopped, *LOGGED, "--train.save_every", "50")[0] == 0
    assert rows(stopped) == expected


def test_the_watch_of_the_loss_goes_on_at_every_step():
    losses = [5 - n / 10 for n in range(30)] + [20.0, 2.0, 21.0, 1.9, 600.0, 1.8, 22.0]
    values = [{"a": loss, "zero": 0.0} for loss in losses]
    weights = {"a": 1.0, "zero": 0.5}

    def said(watch, numbers):
        return [watch.add(n + 1, values[n]) for n in numbers]

    expected = said(LossWatch(weights), range(len(values)))
    assert sum(map(len, expected)) >= 4
    for kill in range(len(values)):
        first, second = LossWatch(weights), LossWatch(weights)
        before = said(first, range(kill))
        second.restore(json.loads(json.dumps(first.figures())))
        assert (first.lowest if kill else math.inf) == second.lowest
        assert before + said(second, range(kill, len(values))) == expected, kill
