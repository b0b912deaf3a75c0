"""Sends the rows of a run's log to TensorBoard and the other monitors of DeepSpeed, to Weights & Biases and to MLflow.

Each tracker has one run for a folder, also if several processes train it: a process that goes on resumes it as the
library does. Projects, names and servers come from the libraries' own variables (WANDB_PROJECT, MLFLOW_TRACKING_URI
...).

The clients are called here, because DeepSpeed's monitor of W&B cannot resume a run and it has none of MLflow, and
accelerate's trackers set up its `PartialState` for the ranks, which have joined already.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.config import RunConfig
from llmdistill.config.command_line import to_dict
from llmdistill.config.strict import flatten
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.report.metrics_log import METRICS_LOG
from llmdistill.runtime.distributed import World
from llmdistill.runtime.terminal import warn_main

TRACKERS_FILE = "trackers.json"
"""File in the run's folder: for each tracker the id of its run."""
_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml"}
"""Monitor -> the module that it needs; DeepSpeed's csv_monitor needs none."""


def check_libraries(config: RunConfig, ds_config: Mapping[str, Any]) -> None:
    """Raise a UserError if the library of a monitor is missing, or two settings name W&B."""
    named = config.train.report_to or []
    enabled = [name for name in _LIBRARIES if ds_config.get(name, {}).get("enabled")]
    if "wandb" in named and "wandb" in enabled:
        raise UserError(
            f"train.report_to has wandb, and wandb is enabled in {config.ds_config}: each would make a run of its own; "
            "remove the block"
        )
    for name in [*named, *enabled]:
        if importlib.util.find_spec(_LIBRARIES[name]) is None:
            where = "train.report_to" if name in named else config.ds_config
            raise UserError(
                f"{where} asks for {name}, whose library is not installed: pip install {_LIBRARIES[name]}, or leave "
                f"{name} out"
            )


def check_access(names: Sequence[str]) -> None:
    """Raise a UserError if a tracker cannot be reached or does not know the user, before a run does any work."""
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun"):
        import wandb

        with _explain_failures("wandb"):
            if wandb.run is None:
                wandb.login()
    if "mlflow" in names:
        import mlflow

        with _explain_failures("mlflow"):
            mlflow.search_experiments(max_results=1)


@contextmanager
def _explain_failures(name: str) -> Iterator[None]:
    """Turn what a tracker's client or the network raises into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"train.report_to {name}: {_one_line(error)}; {_REMEDIES[name]}, or leave it out") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@dataclass
class _Tracker:
    """An open run of a tracker; one that the caller has open is used and left open."""

    id: str
    send: Callable[[int, dict[str, float]], None]
    end: Callable[[bool], None]
    """Ends the run; False if the training is not over."""


def _open_wandb(folder: Path, settings: Mapping[str, Any], known: str | None) -> _Tracker:
    """Open the run of W&B with the id `known`, by default a new one."""
    import wandb

    given, active = os.environ.get, wandb.run
    run = active or wandb.init(
        project=given("WANDB_PROJECT", "llmdistill"),
        name=given("WANDB_NAME", folder.name),
        id=given("WANDB_RUN_ID", known),
        resume="allow",  # goes on with a run that is known, and begins one that is not
        dir=given("WANDB_DIR", str(folder)),
        config=dict(settings),
    )
    return _Tracker(
        id=str(run.id),
        send=lambda step, values: run.log(values, step=step),
        end=lambda whole: None if active else run.finish(exit_code=0 if whole else 1),
    )


def _open_mlflow(folder: Path, settings: Mapping[str, Any], known: str | None) -> _Tracker:
    """Open the run of MLflow with the id `known`, by default a new one, which gets the settings as its parameters."""
    import mlflow

    active = mlflow.active_run()
    run = active or mlflow.start_run(run_id=known, run_name=os.environ.get("MLFLOW_RUN_NAME", folder.name))
    if known is None and active is None:
        values = flatten(dict(settings))
        mlflow.log_params({key: str(value)[:500] for key, value in values.items()})  # every version takes so many
    return _Tracker(
        id=str(run.info.run_id),
        send=lambda step, values: mlflow.log_metrics(values, step=step),
        end=lambda whole: None if active else mlflow.end_run("FINISHED" if whole else "KILLED"),
    )


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
        named = {f"train/{name}": value for name, value in values.items()}
        self._call_each(lambda tracker: tracker.send(step, named), f"from step {step} on")

    def close(self, *, whole: bool) -> None:
        """End the runs of the trackers; not `whole` if the training is not over."""
        self._call_each(lambda tracker: tracker.end(whole), "after the last step")

    def _call_each(self, call: Callable[[_Tracker], None], what: str) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # of their clients and of the network; the log itself is whole
                del self.trackers[name]
                warn_main(
                    f"train.report_to {name} failed ({_one_line(error)}): {what} the rows are in {METRICS_LOG} alone"
                )


@contextmanager
def monitors(config: RunConfig, deepspeed: Any, start: int) -> Iterator[Monitors]:
    """Open the monitors of a run that goes on from step `start`, and close them; only rank 0 sends anything.

    Raises UserError if one cannot be opened.
    """
    opened, folder = Monitors(deepspeed), Path(str(config.output_dir))
    if World.current().is_main:
        writer = getattr(getattr(deepspeed, "tb_monitor", None), "summary_writer", None)
        if writer is not None:  # its next file tells TensorBoard to leave out later steps, of an earlier process
            writer.close()
            writer.purge_step = 0 if start == 0 else start + 1  # step 0 is the validation before the first step
        trackers = [name for name in config.train.report_to or [] if name in _OPEN]
        remedy = "remove the file, and the trackers get new runs"
        known = read_record(folder / TRACKERS_FILE, remedy=remedy) if trackers else None
        for name in trackers:
            with _explain_failures(name):
                run = (known or {}).get(name, {}).get("id")
                opened.trackers[name] = _OPEN[name](folder, to_dict(config), run)
        if trackers:
            write_json(folder / TRACKERS_FILE, {name: {"id": tracker.id} for name, tracker in opened.trackers.items()})
    whole = False
    try:
        yield opened
        whole = True
    finally:
        opened.close(whole=whole)
