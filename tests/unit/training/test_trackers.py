"""The rows of a log, and of it in TensorBoard, W&B and MLflow over the starts of a run; the latter are stand-ins.

A stand-in has those functions of the library's public interface that are called, and keeps what it was sent by run.
"""

import importlib.util
import json
import re
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hostile import refuses

from llmdistill.config import RunConfig, TrainConfig
from llmdistill.errors import Stopped, UserError
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.runtime.distributed import World
from llmdistill.runtime.engine import BatchSplit, student_ds_config
from llmdistill.training.log import RunLog
from llmdistill.training.trackers import TRACKERS_FILE, check_access, check_libraries, monitors

from support import log_rows

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
ROW = {"loss": 1.0, "tokens_per_second": 5.0, "padding_share": 0.0, "teacher_share": 0.0, "kd": 1.0}


@pytest.fixture
def sent(monkeypatch):
    """What the stand-ins were sent: {tracker: {id of the run: [(step, values)]}}, and how their runs ended."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    found = SimpleNamespace(wandb=defaultdict(list), mlflow=defaultdict(list), ends=[], opened=[], fails=False)

    def log(name, run, values, step):
        if found.fails:
            raise ConnectionError("no route to host")
        getattr(found, name)[run].append((step, dict(values)))

    wandb: object = ModuleType("wandb")
    wandb.run = None

    def init(*, project, name, id, resume, dir, config):
        run = id or f"w{len(found.wandb)}"
        found.opened.append(("wandb", project, name, run, resume, config["train"]["steps"]))
        found.wandb[run]  # known from now on
        return SimpleNamespace(
            id=run,
            log=lambda values, step: log("wandb", run, values, step),
            finish=lambda exit_code: found.ends.append(("wandb", exit_code)),
        )

    wandb.init, wandb.login = init, lambda: None
    mlflow: object = ModuleType("mlflow")
    active: list[str] = []

    def start_run(*, run_id, run_name):
        active.append(run_id or f"m{len(found.mlflow)}")
        found.opened.append(("mlflow", run_name, active[-1]))
        return SimpleNamespace(info=SimpleNamespace(run_id=active[-1]))

    mlflow.active_run, mlflow.start_run = lambda: None, start_run
    mlflow.log_params = lambda values: found.opened.append(("params", values["train.steps"]))
    mlflow.log_metrics = lambda values, step: log("mlflow", active[-1], values, step)
    mlflow.end_run = lambda status: found.ends.append(("mlflow", status))
    mlflow.search_experiments = lambda max_results: []
    for module in (wandb, mlflow):
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield found
    while KILLED:
        KILLED.pop().close()


def config_of(folder, **train) -> RunConfig:
    report_to = train.pop("report_to", ["wandb", "mlflow"])
    return RunConfig(output_dir=str(folder), train=TrainConfig(report_to=report_to, **{"steps": 6, **train}))


KILLED: list[ExitStack] = []


def steps(config, start, until, *, rank=0, end=None) -> None:
    """Log the steps after `start`, as a process that trains them does, with a validation before the first one.

    The process ends after them, is stopped, or is killed, and then nothing follows its last step.
    """
    with ExitStack() as stack:
        stack.enter_context(replace(WORLD, rank=rank).entered())
        log = RunLog(Path(str(config.output_dir)), start=start, steps=6)
        log.monitor = stack.enter_context(monitors(config, None, start))
        if start == 0:
            log.add_figures(0, {"valid_loss": 3.5})
        for step in range(start + 1, until + 1):
            log.add_row(step, {**ROW, "loss": float(step)}, 0.0)
        if end == "stop":
            raise Stopped(15, "after a step")
        if end == "kill":
            KILLED.append(stack.pop_all())  # or it would be closed


def log_of(folder) -> list[tuple[int, dict[str, float]]]:
    """The rows of metrics.jsonl as a tracker must have them."""
    rows = log_rows(folder)
    return [(row["step"], {f"train/{key}": value for key, value in row.items() if key != "step"}) for row in rows]


def test_a_run_that_goes_on_resumes_the_run_of_each_tracker(sent, tmp_path):
    config = config_of(tmp_path)
    steps(config, 0, 3, rank=1)
    assert sent.opened == list(tmp_path.iterdir()) == []
    steps(config, 0, 5, end="kill")
    assert log_of(tmp_path)[0] == (0, {"train/valid_loss": 3.5})
    steps(config, 5, 6)
    for name in ("wandb", "mlflow"):
        assert [*getattr(sent, name).values()] == [log_of(tmp_path)]
    assert sent.ends == [("wandb", 0), ("mlflow", "FINISHED")]
    assert sent.opened.count(("wandb", "llmdistill", tmp_path.name, "w0", "allow", 6)) == 2
    params = [each for each in sent.opened if each[0] == "params"]
    assert params == [("params", "6")], "MLflow takes no parameter twice"


def test_a_run_of_the_version_before_goes_on_and_a_later_tracker_begins_with_it(sent, tmp_path):
    entry = {"id": "w7", "shaping": {"steps": 6, "learning_rate": 1e-3}, "sent": None}
    (tmp_path / TRACKERS_FILE).write_text(json.dumps({"wandb": entry}))
    with pytest.raises(Stopped):
        steps(config_of(tmp_path), 2, 4, end="stop")
    assert sent.ends == [("wandb", 1), ("mlflow", "KILLED")]
    assert json.loads((tmp_path / TRACKERS_FILE).read_text()) == {"wandb": {"id": "w7"}, "mlflow": {"id": "m0"}}
    assert [step for step, _ in sent.wandb["w7"]] == [step for step, _ in sent.mlflow["m0"]] == [3, 4]


def test_a_tracker_that_fails_stops_no_training(sent, tmp_path, capsys):
    sent.fails = True
    steps(config_of(tmp_path), 0, 3)
    assert [step for step, _ in log_of(tmp_path)] == [0, 1, 2, 3]
    assert capsys.readouterr().err.count("no route to host") == 2, "one for each tracker"


def test_a_missing_library_and_two_runs_of_one_are_refused(sent, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module != "wandb" else find(module))
    off = {"comet": {"enabled": False}, "csv_monitor": {"enabled": True}}
    check_libraries(config_of(tmp_path, report_to=None), off)
    for report_to, block, said in (
        (["mlflow"], {}, "^train.report_to asks for mlflow, .* pip install mlflow, or leave"),
        (None, {"comet": {"enabled": True}}, r"zero2\.json asks for comet, .* pip install comet_ml"),
        (["wandb"], {"wandb": {"enabled": True}}, "each would make a run of its own; remove the block"),
    ):
        with pytest.raises(UserError, match=said):
            check_libraries(config_of(tmp_path, report_to=report_to), block)


def test_no_key_and_no_server_are_said_before_a_run(sent, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("No API key configured.\nUse `wandb login`.")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    check_access(["tensorboard", "wandb", "mlflow"])
    monkeypatch.setattr(sys.modules["wandb"], "login", refuse)
    refuses("wandb: No API key configured. Use `wandb login`.; run `wandb login`", check_access, ["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_access(["wandb"])
    monkeypatch.setattr(sys.modules["mlflow"], "search_experiments", refuse)
    with pytest.raises(UserError, match=r"report_to mlflow: .*; fix MLFLOW_TRACKING_URI"):
        check_access(["mlflow"])


def test_tensorboard_shows_no_step_of_a_killed_process(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writers = pytest.importorskip("torch.utils.tensorboard")
    files = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    config = config_of(tmp_path, report_to=["tensorboard"])
    for number, (start, until) in enumerate([(0, 5), (2, 3), (2, 6)]):
        # Files are read in the order of their names, which begin with the second: each process has its own.
        monkeypatch.setattr(files, "time", SimpleNamespace(time=lambda number=number: 1e9 + number))
        writer = writers.SummaryWriter(str(tmp_path / "tb"))
        monitor = SimpleNamespace(
            tb_monitor=SimpleNamespace(summary_writer=writer),
            write_events=lambda events, writer=writer: [writer.add_scalar(*event) for event in events],
        )
        with monitors(config, monitor, start) as found:
            for step in range(start + (start > 0), until + 1):
                found.add(step, {"loss": 10.0 * number + step})
        writer.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    shown = [(each.step, each.value) for each in events.Scalars("train/loss")]
    assert shown == [(0, 0.0), (1, 1.0), (2, 2.0), *((step, 20.0 + step) for step in (3, 4, 5, 6))]


def test_the_run_owns_tensorboard_where_the_file_leaves_it_open():
    def owned(block, report_to):
        given = {} if block is None else {"tensorboard": {"enabled": block}}
        settings = TrainConfig(report_to=report_to)
        found = student_ds_config(given, "mine.json", settings, BatchSplit(64, 1), output_dir="runs/a")
        return found.get("tensorboard")

    for block, report_to in (("auto", None), (None, ["tensorboard"])):
        assert owned(block, report_to).items() >= {"enabled": True, "output_path": "runs/a"}.items()
    for block, report_to in (("auto", ["wandb"]), (False, None)):
        assert owned(block, report_to)["enabled"] is False
    assert owned(None, []) is None
    refuses("mine.json: tensorboard.enabled is True, but the run says False", owned, True, ["wandb"])


ROWS = [b'{"step": 1, "loss": 2.5}', b'{"step": 2, "loss": NaN}']


@pytest.mark.parametrize("bad", [b"", b"[1]", b"\xff", b'{"step": "1"}', b"[" * 100_000])
def test_a_bad_line_is_named(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([ROWS[0], bad, ROWS[1]]) + b"\n")
    said = "metrics.jsonl:2: not a row of a training's log; remove the line, and the run goes on"
    refuses(said, read_metrics_log, tmp_path)
    refuses(said, RunLog, tmp_path, start=1, steps=3)


def test_a_resumed_run_drops_later_rows_and_what_a_kill_left_of_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*ROWS, b'{"st']))
    RunLog(tmp_path, start=1, steps=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == ROWS[0] + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"not a log")
    RunLog(tmp_path, start=0, steps=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_columns_stay_apart_at_large_losses(tmp_path, capsys):
    values = {"loss": 161234.5, "hidden": 1.5e-10, "tokens_per_second": 1234567.0, "padding_share": 0.1}
    log = RunLog(tmp_path, start=0, steps=123456)
    log.add_row(123400, {**values, "teacher_share": 0.5}, 60.0)
    header, row = capsys.readouterr().out.splitlines()
    assert len(header) == len(row) <= 80
    assert re.split("  +", header.strip()) == ["step", "loss", "tokens/s", "time left"]
    assert re.split("  +", row.strip()) == ["123400/123456", "1.612e+05", "1,234,567", "1 min 00 s"]
    assert read_metrics_log(tmp_path) == [{"step": 123400, **values, "teacher_share": 0.5}], "the terms too"
