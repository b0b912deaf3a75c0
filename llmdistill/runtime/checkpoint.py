"""The folder of a run: what was asked for, where it stands, and how it goes on."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import nn

from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.runtime.distributed import World, barrier, on_main

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


def last_step(folder: Path) -> int:
    """The step of the newest whole checkpoint, 0 without one."""
    latest = folder / "checkpoints" / "latest"
    match = re.fullmatch(r"step-(\d+)", latest.read_text(encoding="utf-8").strip()) if latest.is_file() else None
    return int(match.group(1)) if match is not None else 0


def save_checkpoint(engine: Any, folder: Path, step: int, keep: int, world: World) -> None:
    """Write a checkpoint and drop the oldest beyond `keep`; every rank must call it.

    Frozen parameters are left out: they are the untrained student's. DeepSpeed points `latest` at it once all of it is
    written: a kill in between leaves the one before in force.
    """
    checkpoints = folder / "checkpoints"
    with _only_trained(engine.module):
        engine.save_checkpoint(
            str(checkpoints), tag=f"step-{step}", client_state={"step": step}, exclude_frozen_parameters=True
        )
    barrier()
    if world.is_main:
        steps = sorted(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
        for old in steps[:-keep]:
            shutil.rmtree(checkpoints / f"step-{old}")


def load_checkpoint(engine: Any, folder: Path) -> int:
    """Load the newest checkpoint into the engine and return its step; 0 without one.

    Raises:
        UserError: it is damaged, or holds other parameters than those that are trained.
    """
    step = last_step(folder)
    if step > 0:
        where = folder / "checkpoints" / f"step-{step}"

        def load(src: dict[str, Any], dst: nn.Module) -> None:
            found = dst.load_state_dict(src, strict=False)
            missing = set(found.missing_keys) - set(_frozen(dst))
            differing = sorted(missing | set(found.unexpected_keys))
            if differing:
                raise UserError(
                    f"{where}: it is of another student, first in {differing[0]}; choose another output_dir"
                )

        path, state = engine.load_checkpoint(str(where.parent), tag=where.name, custom_load_fn=load)
        if path is None or state["step"] != step:
            raise UserError(f"{where}: it cannot be loaded; remove it and its name in `latest`")
    return step


def _frozen(module: nn.Module) -> list[str]:
    """Names of the parameters that are not trained; a tied one has several."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


@contextmanager
def _only_trained(module: nn.Module) -> Iterator[None]:
    """Inside the block the module's state has no frozen parameters; DeepSpeed itself would keep a tied one's alias."""
    frozen = _frozen(module)

    def drop(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        for name in frozen:
            state.pop(name, None)

    handle = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()
