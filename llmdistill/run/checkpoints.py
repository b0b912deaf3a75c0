"""The checkpoints of a run: how they are saved, found and loaded."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World, barrier


def last_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    latest = folder / "checkpoints" / "latest"
    match = re.fullmatch(r"step-(\d+)", latest.read_text(encoding="utf-8").strip()) if latest.is_file() else None
    return int(match.group(1)) if match is not None else 0


def save_checkpoint(engine: Any, folder: Path, step: int, keep: int, world: World) -> None:
    """Save a checkpoint and delete all but the newest `keep` checkpoints; every rank must call this function.

    Frozen parameters are not saved, because they equal those of the untrained student. DeepSpeed updates `latest` only
    when the checkpoint is complete, so `latest` names the previous checkpoint if the process is killed before that.
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
    """Load the newest checkpoint into the engine and return its step, 0 if there is none; a UserError if it is damaged.

    Its parameters must be the trainable parameters of the student.
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
    """Return the names of the frozen parameters; a tied parameter has several names."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if not parameter.requires_grad]


@contextmanager
def _only_trained(module: nn.Module) -> Iterator[None]:
    """Remove frozen parameters from the module's state dict in the block; DeepSpeed would keep aliases of tied ones."""
    frozen = _frozen(module)

    def drop(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
        for name in frozen:
            state.pop(name, None)

    handle = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()
