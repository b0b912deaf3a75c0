"""The folder of a run: what was asked for, where it stands, and how it goes on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.runtime.distributed import World, barrier, broadcast_object

RUN_FILE = "run.json"
_FREE_KEYS = ("output_dir", "resume", "ds_config", "scoring", "data.tests")
_FREE_TRAIN_KEYS = ("log_every", "save_every", "keep_checkpoints")


def claim_folder(folder: Path, run: dict[str, Any], *, resume: str, world: World) -> None:
    """Make the run's folder, or make sure that what is in it is this run.

    Args:
        folder: the run's folder.
        run: ``{"config": …, "ds_config": …, "world_size": …}``, all plain JSON values.
        resume: "auto" or "never".
        world: this process; every rank must call it.

    Raises:
        UserError: the folder belongs to another configuration, or holds a run where none is wanted.
    """
    message = _claim(folder, run, resume) if world.is_main else None
    message = broadcast_object(message)
    if message is not None:
        raise UserError(message)


def _claim(folder: Path, run: dict[str, Any], resume: str) -> str | None:
    """What is wrong with the folder, if anything; else it is ours."""
    file = folder / RUN_FILE
    if not file.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            return f"output_dir {folder}: the folder is not empty and holds no run; choose another or empty it"
        write_json(file, run)
        return None
    if resume == "never":
        return f"output_dir {folder}: it holds a run already, and resume is never; choose another folder or resume auto"
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return f"{file}: not valid JSON; choose another output_dir or remove this one"
    different = _differences(_identity(old), _identity(run))
    if different:
        key, before, now = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        return (
            f"output_dir {folder}: it holds a run of another configuration: {key} was {before} and is now {now}{more}; "
            "choose another output_dir, or give the same settings to go on with it"
        )
    write_json(file, run)
    return None


def _identity(run: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run: all that could change the student."""
    config = json.loads(json.dumps(run["config"]))
    for key in _FREE_KEYS:
        *parents, name = key.split(".")
        block = config
        for parent in parents:
            block = block[parent]
        block.pop(name, None)
    for key in _FREE_TRAIN_KEYS:
        config["train"].pop(key, None)
    ds_config = {key: value for key, value in run["ds_config"].items() if key != "tensorboard"}
    # ZeRO checkpoints are cut for a number of ranks.
    return {**config, "ds_config": ds_config, "number of ranks": run["world_size"]}


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [(prefix, old, new)]
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        found += _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    return found


def last_step(folder: Path) -> int:
    """The step of the newest whole checkpoint, 0 without one."""
    latest = folder / "checkpoints" / "latest"
    match = re.fullmatch(r"step-(\d+)", latest.read_text(encoding="utf-8").strip()) if latest.is_file() else None
    return int(match.group(1)) if match is not None else 0


def save_checkpoint(engine: Any, folder: Path, step: int, keep: int, world: World) -> None:
    """Write a checkpoint and drop the oldest beyond `keep`; every rank must call it.

    DeepSpeed points `latest` at it once all of it is written: a kill in between leaves the one before in force.
    """
    checkpoints = folder / "checkpoints"
    engine.save_checkpoint(str(checkpoints), tag=f"step-{step}", client_state={"step": step})
    barrier()
    if world.is_main:
        steps = sorted(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
        for old in steps[:-keep]:
            shutil.rmtree(checkpoints / f"step-{old}")


def load_checkpoint(engine: Any, folder: Path) -> int:
    """Load the newest checkpoint into the engine and return its step; 0 without one."""
    step = last_step(folder)
    if step > 0:
        path, state = engine.load_checkpoint(str(folder / "checkpoints"), tag=f"step-{step}")
        if path is None or state["step"] != step:
            raise UserError(
                f"{folder / 'checkpoints' / f'step-{step}'}: it cannot be loaded; remove it and its name in `latest`"
            )
    return step
