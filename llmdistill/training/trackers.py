"""Sends the rows of a run's log to TensorBoard and the other monitors of DeepSpeed, to Weights & Biases and to MLflow.

Each tracker has one run for a folder, also if several processes train it, and gets every row once: a process that goes
on sends what the tracker does not have. Projects, names and servers come from the libraries' own variables
(WANDB_PROJECT, MLFLOW_TRACKING_URI ...).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.config import RunConfig
from llmdistill.config.command_line import to_dict
from llmdistill.config.strict import flattened
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.report.metrics_log import METRICS_LOG, Log
from llmdistill.runtime.distributed import World
from llmdistill.runtime.terminal import warn_main

TRACKERS_FILE = "trackers.json"
"""File in the run's folder: for each tracker the id of its run, the settings that shape the rows (`shaping`), and the
last step that it has got (`sent`), which is null until a process has ended in order."""
_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}
"""Monitor -> the module that it needs; DeepSpeed's csv_monitor needs none."""


def check_libraries(config: RunConfig, ds_config: Mapping[str, Any]) -> None:
    """Raise a UserError if the library of a monitor is missing, or W&B is asked for in two places."""
    asked = config.train.report_to or []
    enabled = [name for name in _LIBRARIES if ds_config.get(name, {}).get("enabled")]
    if "wandb" in asked and "wandb" in enabled:
        raise UserError(
            f"train.report_to has wandb, and wandb is enabled in {config.ds_config}: each would make a run of its own; "
            "remove the block"
        )
    for name in [*asked, *enabled]:
        if importlib.util.find_spec(_LIBRARIES[name]) is None:
            where = "train.report_to" if name in asked else config.ds_config
            raise UserError(
                f"{where} asks for {name}, whose library is not installed: pip install {_LIBRARIES[name]}, or leave "
                f"{name} out"
            )


def check_access(names: Sequence[str]) -> None:
    """Raise a UserError if a tracker cannot be reached or does not know the user, before a run does any work."""
    if "wandb" in names and not _is_offline("wandb"):
        import wandb

        with _failing("wandb"):
            if wandb.run is None:
                wandb.login()
    if "mlflow" in names:
        import mlflow

        with _failing("mlflow"):
            mlflow.search_experiments(max_results=1)


@contextmanager
def _failing(name: str) -> Iterator[None]:
    """Turn what a tracker's client or the network raises into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"train.report_to {name}: {_said(error)}; {_REMEDIES[name]}, or leave it out") from error


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@dataclass
class _Tracker:
    """An open run of a tracker; one that the caller has open is used and left open."""

    id: str
    last: int
    """The last step that the run has, -1 without any."""
    send: Callable[[int, dict[str, float]], None]
    end: Callable[[bool], None]
    """Ends the run; False if the training is not over."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send the figures of a step, unless the run has them."""
        if step > self.last:
            self.send(step, {f"train/{name}": value for name, value in values.items()})
            self.last = step


def _open_wandb(folder: Path, settings: Mapping[str, Any], known: str | None) -> _Tracker:
    """Open the run of W&B with the id `known`, by default a new one."""
    import wandb

    given, active = os.environ.get, wandb.run
    run = active or wandb.init(
        project=given("WANDB_PROJECT", "llmdistill"),
        name=given("WANDB_NAME", folder.name),
        id=given("WANDB_RUN_ID", known),
        resume="allow",
        dir=given("WANDB_DIR", str(folder)),
        config=dict(settings),
    )
    return _Tracker(
        id=str(run.id),
        last=int(run.step) - 1,
        send=lambda step, values: run.log(values, step=step),
        end=lambda whole: None if active else run.finish(exit_code=0 if whole else 1),
    )


def _open_mlflow(folder: Path, settings: Mapping[str, Any], known: str | None) -> _Tracker:
    """Open the run of MLflow with the id `known`, by default a new one, which gets the settings as its parameters."""
    import mlflow

    active = mlflow.active_run()
    run = active or mlflow.start_run(run_id=known, run_name=os.environ.get("MLFLOW_RUN_NAME", folder.name))
    if known is None and active is None:
        values = flattened(dict(settings))
        mlflow.log_params({key: str(value)[:500] for key, value in values.items()})  # every version takes so many
    client = mlflow.MlflowClient()
    found = [client.get_metric_history(run.info.run_id, f"train/{name}") for name in ("loss", "valid_loss")]
    return _Tracker(
        id=str(run.info.run_id),
        last=max((int(each.step) for history in found for each in history), default=-1),
        send=lambda step, values: mlflow.log_metrics(values, step=step),
        end=lambda whole: None if active else mlflow.end_run("FINISHED" if whole else "KILLED"),
    )


def _is_offline(name: str) -> bool:
    """Whether a tracker cannot tell `last`: without network W&B does not read its files, which a kill cuts short."""
    return name == "wandb" and os.environ.get("WANDB_MODE", "online") in ("offline", "disabled", "dryrun")


_OPEN = {"wandb": _open_wandb, "mlflow": _open_mlflow}
_REMEDIES = {
    "wandb": "run `wandb login`, set WANDB_API_KEY, or work without the network by WANDB_MODE=offline",
    "mlflow": "fix MLFLOW_TRACKING_URI, or remove the variable to keep the run in a file here",
}


class Monitors:
    """What gets the rows of a log besides its file."""

    def __init__(self, deepspeed: Any) -> None:
        """`deepspeed` is DeepSpeed's monitor or None."""
        self._deepspeed = deepspeed
        self.trackers: dict[str, _Tracker] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send the figures of one step. A tracker that fails is left out from then on, with a warning."""
        if self._deepspeed is not None:
            self._deepspeed.write_events([(f"train/{name}", value, step) for name, value in values.items()])
        self._each(lambda tracker: tracker.add(step, values), f"from step {step} on")

    def close(self, *, whole: bool) -> None:
        """End the runs of the trackers; not `whole` if the training is not over."""
        self._each(lambda tracker: tracker.end(whole), "after the last step")

    def _each(self, call: Callable[[_Tracker], None], what: str) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # of their clients and of the network; the log itself is whole
                del self.trackers[name]
                said = f"train.report_to {name} failed ({_said(error)}): {what} the rows are in {METRICS_LOG} alone"
                warn_main(said)


@contextmanager
def monitors(config: RunConfig, deepspeed: Any, rows: Log, start: int) -> Iterator[Monitors]:
    """Open the monitors of a run that goes on from step `start`, and close them; only rank 0 sends anything.

    `rows` are those of the log up to this step: a tracker gets those that it lacks. Raises UserError if one cannot be
    opened.
    """
    world = World.current()
    found, record = Monitors(deepspeed), dict[str, Any]()
    file = Path(str(config.output_dir)) / TRACKERS_FILE
    if world.is_main:
        writer = getattr(getattr(deepspeed, "tb_monitor", None), "summary_writer", None)
        if writer is not None:  # its next file tells TensorBoard to leave out later steps, of an earlier process
            writer.close()
            writer.purge_step = 0 if start == 0 else start + 1  # step 0 is the validation before the first step
        for name in config.train.report_to or []:
            if name in _OPEN:
                kept = read_record(file, remedy="remove the file, and the trackers get new runs") or {}
                with _failing(name):
                    found.trackers[name], record[name] = _open(name, config, kept.get(name), rows, start)
        if record:
            write_json(file, record)
    whole = False
    try:
        yield found
        whole = True
    finally:
        found.close(whole=whole)
        for each, tracker in found.trackers.items():
            record[each]["sent"] = tracker.last
        if record:
            write_json(file, record)


def _open(
    name: str, config: RunConfig, entry: Mapping[str, Any] | None, rows: Log, start: int
) -> tuple[_Tracker, dict[str, Any]]:
    """Return an open tracker that has the rows, and its entry in the file.

    It is a new run if the run of the earlier entry has rows after `start` that this training makes otherwise: no
    tracker takes rows back.
    """
    opened = partial(_OPEN[name], Path(str(config.output_dir)), to_dict(config))
    shaping = {"steps": config.train.steps, "learning_rate": config.train.learning_rate}
    tracker = None
    if entry is not None and (entry["sent"] is not None or not _is_offline(name)):
        tracker = opened(entry["id"])
        if _is_offline(name):
            tracker.last = int(entry["sent"])
        if tracker.last > start and entry["shaping"] != shaping:
            tracker.end(True)
            tracker = None
    if tracker is None:
        tracker = opened(None)
    for row in rows:
        tracker.add(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
    return tracker, {"id": tracker.id, "shaping": shaping, "sent": None}
