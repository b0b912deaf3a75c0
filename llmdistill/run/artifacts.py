"""What a folder holds: the record of what was asked for, and whether that is finished, goes on, or differs."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import IO, Any

from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.runtime.distributed import World, on_main

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
_FREE_KEYS = (
    *("output_dir", "resume", "ds_config", "scoring", "tasks", "data.tests", "data.valid"),
    *("train.log_every", "train.validate_every", "train.save_every", "train.keep_checkpoints"),
)
_LOCKS: list[IO[str]] = []  # open as long as the process lives, and the locks with them


def claim_folder(folder: Path, run: dict[str, Any], *, resume: str, world: World) -> None:
    """Make the run's folder, or make sure that what is in it is this run.

    Args:
        folder: the run's folder.
        run: ``{"config": …, "ds_config": …, "world_size": …}``, all plain JSON values.
        resume: "auto" or "never".
        world: this process; every rank must call it.

    Raises:
        UserError: the folder belongs to another configuration, holds a run where none is wanted, or one that another
            process is at.
    """

    def claim() -> None:
        _claim(folder, run, resume)
        _lock(folder)

    on_main(claim, world)


def _claim(folder: Path, run: dict[str, Any], resume: str) -> None:
    file = folder / RUN_FILE
    if not file.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(
                f"output_dir {folder}: the folder is not empty and holds no run; choose another or empty it"
            )
        write_json(file, run)
        return
    if resume == "never":
        raise UserError(
            f"output_dir {folder}: it holds a run already, and resume is never; choose another folder or resume auto"
        )
    try:
        old = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not valid JSON; choose another output_dir or remove this one") from error
    different = _differences(_identity(old), _identity(run))
    if different:
        key, before, now = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"output_dir {folder}: it holds a run of another configuration: {key} was {before} and is now {now}{more}; "
            "choose another output_dir, or give the same settings to go on with it"
        )
    write_json(file, run)


def _lock(folder: Path) -> None:
    """Keep other processes out of the folder until this one ends, where the file system can."""
    file = (folder / LOCK_FILE).open("w", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UserError(
            f"output_dir {folder}: another process is at this run; wait for it, stop it, or choose another folder"
        ) from error
    except OSError:
        pass  # some network file systems have no locks
    _LOCKS.append(file)


def shaping_settings(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as plain JSON values without what cannot change the student."""
    shaping = json.loads(json.dumps(config))
    for key in _FREE_KEYS:
        *parents, name = key.split(".")
        block = shaping
        for parent in parents:
            block = block[parent]
        block.pop(name, None)
    return dict(shaping)


def _identity(run: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run."""
    ds_config = {key: value for key, value in run["ds_config"].items() if key != "tensorboard"}
    # ZeRO checkpoints are cut for a number of ranks.
    return {**shaping_settings(run["config"]), "ds_config": ds_config, "number of ranks": run["world_size"]}


def _differences(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return [] if old == new else [(prefix, old, new)]
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        found += _differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    return found
