"""What a run that goes on may have otherwise than it began: more steps, and after an error a lower learning rate."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.artifacts import MANIFEST, read_record
from llmdistill.errors import UserError
from llmdistill.run.callbacks.best import read_best
from llmdistill.run.callbacks.finite import ENDED, NOT_FINITE
from llmdistill.run.checkpoints import checkpoints

METRICS_FILE = "metrics.json"
"""This file is written last: a folder that contains it is finished."""
_STEPS = "earlier_steps"
"""Key in the record of a run: for each time that its steps were increased the setting, its old value, and the step."""
_RATES = "earlier_learning_rates"
"""Key in the record of a run: the peak learning rates that it had before, the first one first."""


def with_changes(folder: Path, old: Mapping[str, Any], new: dict[str, Any], *, may_go_on: bool) -> Mapping[str, Any]:
    """Return the old record with what may change of the new one, to which the earlier values are added.

    The learning rate may be lower if a step whose loss or gradient was not finite has ended the run, which could not
    continue otherwise. With `may_go_on` the steps may be more: the batch of a step depends only on the seed and the
    number of the step, so the student differs from that of one long run only by the schedule of the learning rate.

    Raises:
        UserError: the steps are more, and the run has trained its student and has no checkpoint to resume from.
    """
    was, now = old["config"]["train"], new["config"]["train"]
    earlier = {key: list(old.get(key, ())) for key in (_RATES, _STEPS)}
    changed: dict[str, Any] = {}
    if now["learning_rate"] < was["learning_rate"]:
        ended = read_record(folder / NOT_FINITE / ENDED, remedy="remove the file", keys={"learning_rate": float})
        if ended is not None and ended["learning_rate"] == was["learning_rate"]:
            changed["learning_rate"] = now["learning_rate"]
            earlier[_RATES].append(was["learning_rate"])
    for key in ("steps", "epochs"):
        if not may_go_on or None in (was[key], now[key]) or now[key] <= was[key]:
            continue
        found = checkpoints(folder)
        if not found and (folder / "student").exists():
            raise UserError(
                f"train.{key} was {was[key]} and is now {now[key]}, but {folder} has no checkpoint to go on from: "
                "choose another output_dir"
            )
        changed[key] = now[key]
        earlier[_STEPS] += [{"key": key, "value": was[key], "step": found[-1].step}] if found else []
    new |= {key: values for key, values in earlier.items() if values}
    return {**old, "config": {**old["config"], "train": {**was, **changed}}}


def is_raised(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the new record of a run, from `with_changes`, asks for more steps than the old one."""
    return len(new.get(_STEPS, ())) > len(old.get(_STEPS, ()))


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


def changes_warnings(record: Mapping[str, Any]) -> list[str]:
    """Return what the report of a run with changes must say; more steps matter where the learning rate is scheduled."""
    train, warnings = record.get("config", {}).get("train", {}), []
    if record.get(_RATES):
        rates = ", then ".join(f"{each:g}" for each in record[_RATES])
        warnings.append(
            f"the learning rate was {rates} until the loss or the gradient was not finite; the run went on from its "
            f"last checkpoint with {train['learning_rate']:g}"
        )
    earlier = record.get(_STEPS, [])
    if earlier and not (train["schedule"] == "constant" and train["warmup_ratio"] is None):
        said = ", then ".join(f"{each['value']} until step {each['step']}" for each in earlier)
        key = earlier[-1]["key"]
        warnings.append(
            f"train.{key} was {said}, and the run went on with {train[key]}: the learning rate of each step is that of "
            f"the number of {key} at its time, so the student is not that of one run of {train[key]} {key}"
        )
    return warnings
