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
from functools import partial
from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.config import RunConfig
from llmdistill.config.command_line import to_dict
from llmdistill.config.strict import flattened
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.report.metrics_log import METRICS_LOG, Log, row_of
from llmdistill.runtime.distributed import World
from llmdistill.runtime.terminal import warn_main

TRACKERS_FILE = "trackers.json"
"""File in the run's folder: for each tracker the id of its run, the settings that shape the rows (`shaping`), and the
last step that it has got (`sent`), which is null until a process has ended in order."""
Event = tuple[str, float, int]
"""Name, value and step of a figure."""
_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}
"""Monitor -> the module that it needs; DeepSpeed's csv_monitor needs none."""
_LONGEST_PARAM = 500
"""Characters that every version of MLflow takes as the value of a parameter."""


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
    for name in names:
        if name in _TRACKERS:
            try:
                _TRACKERS[name].check()
            except Exception as error:  # of their clients and of the network
                raise _failed(name, error) from error


def _failed(name: str, error: Exception) -> UserError:
    said = " ".join(str(error).split())[:300] or type(error).__name__
    return UserError(f"train.report_to {name}: {said}; {_TRACKERS[name].remedy}, or leave it out")


class _WandB:
    """A run of Weights & Biases; one that the caller has open is used and left open."""

    remedy = "run `wandb login`, set WANDB_API_KEY, or work without the network by WANDB_MODE=offline"

    @staticmethod
    def knows() -> bool:
        """Whether `last` is known; without the network W&B does not read its files, which a kill cuts short."""
        return os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")

    @classmethod
    def check(cls) -> None:
        """Raise an error of W&B without an API key."""
        import wandb

        if wandb.run is None and cls.knows():
            wandb.login()

    def __init__(self, folder: Path, settings: Mapping[str, Any], known: str | None) -> None:
        """Open the run of the id `known`, by default a new one."""
        import wandb

        given = os.environ.get
        self._own = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=given("WANDB_PROJECT", "llmdistill"),
            name=given("WANDB_NAME", folder.name),
            id=given("WANDB_RUN_ID", known),
            resume="allow",
            dir=given("WANDB_DIR", str(folder)),
            config=dict(settings),
        )
        self.id = str(self._run.id)

    def last(self) -> int:
        """Return the last step that the run has, -1 without any."""
        return int(self._run.step) - 1

    def send(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self, *, whole: bool) -> None:
        if self._own:
            self._run.finish(exit_code=0 if whole else 1)


class _MLflow:
    """A run of MLflow; one that the caller has open is used and left open."""

    remedy = "fix MLFLOW_TRACKING_URI, or remove the variable to keep the run in a file here"

    @staticmethod
    def knows() -> bool:
        """Whether `last` is known."""
        return True

    @classmethod
    def check(cls) -> None:
        """Raise an error of MLflow if its store does not answer."""
        import mlflow

        mlflow.search_experiments(max_results=1)

    def __init__(self, folder: Path, settings: Mapping[str, Any], known: str | None) -> None:
        """Open the run of the id `known`, by default a new one, which gets the settings as its parameters."""
        import mlflow

        self._mlflow, run = mlflow, mlflow.active_run()
        self._own = run is None
        if run is None:
            run = mlflow.start_run(run_id=known, run_name=os.environ.get("MLFLOW_RUN_NAME", folder.name))
        self.id = str(run.info.run_id)
        if known is None and self._own:
            values = flattened(dict(settings))
            mlflow.log_params({key: str(value)[:_LONGEST_PARAM] for key, value in values.items()})

    def last(self) -> int:
        """Return the last step that the run has, -1 without any."""
        client = self._mlflow.MlflowClient()
        found = [client.get_metric_history(self.id, f"train/{name}") for name in ("loss", "valid_loss")]
        return max((int(each.step) for history in found for each in history), default=-1)

    def send(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self, *, whole: bool) -> None:
        if self._own:
            self._mlflow.end_run("FINISHED" if whole else "KILLED")


_TRACKERS: dict[str, type[_WandB] | type[_MLflow]] = {"wandb": _WandB, "mlflow": _MLflow}


class Monitors:
    """What gets the rows of a log besides its file; has the one method of DeepSpeed's monitor that the log calls."""

    def __init__(self, deepspeed: Any, warn: Callable[[str], None]) -> None:
        """`deepspeed` is DeepSpeed's monitor or None."""
        self._deepspeed = deepspeed
        self._trackers: dict[str, Any] = {}
        self._warn = warn
        self.sent: dict[str, int] = {}
        """The last step that each tracker has got."""

    def add(self, name: str, tracker: Any, last: int) -> None:
        """Add a tracker that has the rows up to a step."""
        self._trackers[name], self.sent[name] = tracker, last

    def write_events(self, events: Sequence[Event]) -> None:
        """Send the figures of one step. A tracker that fails is left out from then on, with a warning."""
        if self._deepspeed is not None:
            self._deepspeed.write_events(list(events))
        step, values = events[0][2], {name: value for name, value, _ in events}
        for name, tracker in list(self._trackers.items()):
            if step > self.sent[name] and self._has_done(
                name, partial(tracker.send, step, values), f"from step {step} on"
            ):
                self.sent[name] = step

    def close(self, *, whole: bool) -> None:
        """End the runs of the trackers; not `whole` if the training is not over."""
        for name, tracker in list(self._trackers.items()):
            self._has_done(name, partial(tracker.close, whole=whole), "after the last step")

    def _has_done(self, name: str, call: Callable[[], None], what: str) -> bool:
        try:
            call()
        except Exception as error:  # of their clients and of the network; the log itself is whole
            del self._trackers[name], self.sent[name]
            said = " ".join(str(error).split())[:300]
            self._warn(f"train.report_to {name} failed ({said}): {what} the rows are in {METRICS_LOG} alone")
            return False
        return True


@contextmanager
def monitors(config: RunConfig, deepspeed: Any, start: int, world: World) -> Iterator[Monitors]:
    """Open the monitors of a run that goes on from step `start`, and close them; only rank 0 sends anything.

    Raises UserError if a tracker cannot be opened.
    """
    file = Path(str(config.output_dir)) / TRACKERS_FILE
    found = Monitors(deepspeed, lambda said: warn_main(said, world))
    record: dict[str, Any] = {}
    if world.is_main:
        _forget_after(deepspeed, start)
        record = _open(found, config, file, start)
    whole = False
    try:
        yield found
        whole = True
    finally:
        found.close(whole=whole)
        if record:
            write_json(file, {name: {**entry, "sent": found.sent.get(name)} for name, entry in record.items()})


def _forget_after(deepspeed: Any, start: int) -> None:
    """Let TensorBoard leave out the events that an earlier process has written after a step."""
    writer = getattr(getattr(deepspeed, "tb_monitor", None), "summary_writer", None)
    if writer is not None:
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
        from tensorboard.compat.proto.event_pb2 import SessionLog

        mark = SessionLog(status=SessionLog.START)
        first = 0 if start == 0 else start + 1  # step 0 is the validation before the first step
        writer.file_writer.add_event(TensorBoardEvent(step=first, session_log=mark))


def _open(found: Monitors, config: RunConfig, file: Path, start: int) -> dict[str, Any]:
    """Open the trackers of a run and send the rows up to `start` that they lack; return what was written to `file`."""
    names = [name for name in config.train.report_to or [] if name in _TRACKERS]
    if not names:
        return {}
    record: dict[str, Any] = read_record(file, remedy="remove the file, and the trackers get new runs") or {}
    shaping = {"steps": config.train.steps, "learning_rate": config.train.learning_rate}
    rows = [row for row in _rows(file.parent) if row["step"] <= start]
    for name in names:
        try:
            tracker, last = _opened(name, config, record.get(name), shaping, start)
            for row in rows:
                if row["step"] > last:
                    values = {f"train/{key}": value for key, value in row.items() if key != "step"}
                    tracker.send(int(row["step"]), values)
                    last = int(row["step"])
        except Exception as error:  # of their clients and of the network
            raise _failed(name, error) from error
        found.add(name, tracker, last)
        record[name] = {"id": tracker.id, "shaping": shaping, "sent": None}
    write_json(file, record)
    return record


def _opened(
    name: str, config: RunConfig, entry: Mapping[str, Any] | None, shaping: Mapping[str, Any], start: int
) -> tuple[Any, int]:
    """Return an open tracker and the last step that it has; it is a new run if what the old one has cannot be used."""
    kind, folder, settings = _TRACKERS[name], Path(str(config.output_dir)), to_dict(config)
    if entry is not None and (kind.knows() or entry["sent"] is not None):
        tracker = kind(folder, settings, entry["id"])
        last = tracker.last() if kind.knows() else int(entry["sent"])
        if last <= start or entry["shaping"] == shaping:
            return tracker, last
        tracker.close(whole=True)  # its rows after `start` are of other settings, and no tracker takes rows back
    tracker = kind(folder, settings, None)
    return tracker, tracker.last()


def _rows(folder: Path) -> Log:
    """Return the rows that a log begins with, as earlier processes have sent them."""
    file, rows = folder / METRICS_LOG, []
    content = file.read_bytes() if file.is_file() else b""
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            rows.append(row_of(line, str(file)))
        except UserError:  # the log itself says it where it matters
            break
    return rows
