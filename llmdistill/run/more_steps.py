"""A run that was stopped or is finished may be resumed with more steps than it began with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.artifacts import MANIFEST
from llmdistill.errors import UserError
from llmdistill.run.callbacks.best import read_best
from llmdistill.run.checkpoints import checkpoints

METRICS_FILE = "metrics.json"
"""This file is written last: a folder that contains it is finished."""
_EARLIER = "earlier_steps"
"""Key in the record of a run: for each time that its steps were increased the setting, its old value, and the step."""
_KEYS = ("steps", "epochs")


def with_raised_steps(folder: Path, old: Mapping[str, Any], new: dict[str, Any]) -> Mapping[str, Any]:
    """Return the old record with the larger number of steps, and add the earlier number to the new record.

    The batch of a step depends only on the seed and the number of the step, so the student differs from that of one
    long run only by the schedule of the learning rate.

    Raises:
        UserError: the run has trained its student and has no checkpoint to resume from.
    """
    earlier = list(old.get(_EARLIER, ()))
    was, now = old["config"]["train"], new["config"]["train"]
    key = next((key for key in _KEYS if None not in (was[key], now[key]) and now[key] > was[key]), None)
    if key is not None:
        found = checkpoints(folder)
        if not found and (folder / "student").exists():
            raise UserError(
                f"train.{key} was {was[key]} and is now {now[key]}, but {folder} has no checkpoint to go on from: "
                "choose another output_dir"
            )
        if found:
            earlier.append({"key": key, "value": was[key], "step": found[-1].step})
        old = {**old, "config": {**old["config"], "train": {**was, key: now[key]}}}
    if earlier:
        new[_EARLIER] = earlier
    return old


def forget_end(folder: Path) -> None:
    """Remove the results of a finished run, so that it resumes from its last checkpoint; rank 0 only.

    The best student becomes the best student so far.
    """
    for name in (METRICS_FILE, "report.md", "report.html", "scores/student.json", MANIFEST):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "predictions" / "student", ignore_errors=True)
    best = read_best(folder)
    if best is not None and (folder / "student").is_dir() and not (folder / best["student"]).exists():
        (folder / best["student"]).parent.mkdir(exist_ok=True)
        (folder / "student").rename(folder / best["student"])
    shutil.rmtree(folder / "student", ignore_errors=True)


def is_raised(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new record of a run, from `with_raised_steps`, asks for more steps than the old one."""
    return len(new.get(_EARLIER, ())) > len(old.get(_EARLIER, ()))


def steps_warnings(record: Mapping[str, Any]) -> list[str]:
    """Return the warning for the report of a run whose steps were increased; none if its learning rate is constant."""
    earlier, train = record.get(_EARLIER, []), record.get("config", {}).get("train", {})
    if not earlier or (train["schedule"] == "constant" and train["warmup_ratio"] is None):
        return []
    said = ", then ".join(f"{each['value']} until step {each['step']}" for each in earlier)
    key = earlier[-1]["key"]
    return [
        f"train.{key} was {said}, and the run went on with {train[key]}: the learning rate of each step is that of the "
        f"number of {key} at its time, so the student is not that of one run of {train[key]} {key}"
    ]
