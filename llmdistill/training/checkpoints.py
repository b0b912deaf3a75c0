"""The checkpoints of a run: how they are saved, checked, found and loaded.

A checkpoint is a folder `checkpoints/step-N`: the fragments of each rank as a safetensors file, and a manifest with the
size and the hash of each file. The manifest is written last, so a folder with a manifest is complete. Fragments do not
depend on the number of ranks, the ZeRO stage, the micro batch size or the buckets (see `runtime.training_state`).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmdistill.artifacts import MANIFEST, entries_damage, find_record
from llmdistill.errors import UserError
from llmdistill.files import sync, write_error, write_json
from llmdistill.fingerprints import file_entry
from llmdistill.report.metrics_log import METRICS_LOG
from llmdistill.runtime.distributed import World, gather_objects, on_every, on_main
from llmdistill.runtime.terminal import warn_main
from llmdistill.runtime.training_state import (
    WEIGHT,
    Fragment,
    counters,
    create_state,
    fragments,
    restoring,
    set_counters,
)

_FORMAT = 1
_KEYS = {"step": int, "ranks": int, "state": dict, "parameters": dict, "kinds": list, "files": dict}
"""What a manifest of this format has."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a manifest."""

    folder: Path
    step: int
    manifest: dict[str, Any]
    """Empty if it is damaged."""
    damage: str | None = None
    """What is wrong with the manifest."""


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a run's folder that have a manifest in the order of their steps.

    Their manifests are checked, the hashes of their files are not. Raises UserError if one is of another format.
    """
    saved: list[Checkpoint] = []
    for step, path in _folders(folder):
        file = path / MANIFEST
        if not file.is_file():
            continue
        manifest, damage = find_record(file, {"format": int})
        if manifest is not None:
            if manifest["format"] != _FORMAT:
                raise UserError(
                    f"{path}: a checkpoint of format {manifest['format']}, this version reads {_FORMAT}: "
                    "finish the run with the version that began it"
                )
            manifest, damage = find_record(file, _KEYS)
        if manifest is not None and manifest["step"] != step:
            damage = f"{file}: it is of step {manifest['step']}"
        saved.append(Checkpoint(path, step, manifest or {}, damage))
    return sorted(saved, key=lambda checkpoint: checkpoint.step)


def _folders(folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of all that a run has saved, complete or not; other names are the user's own folders."""
    names = ((re.fullmatch(r"step-([0-9]{1,18})", path.name), path) for path in (folder / "checkpoints").glob("step-*"))
    return [(int(name[1]), path) for name, path in names if name is not None and path.is_dir()]


def save_checkpoint(
    engine: Any,
    folder: Path,
    step: int,
    keep: int,
    *,
    loss_modes: Mapping[str, Any] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Save a checkpoint and delete all but the newest `keep` checkpoints; every rank must call this function.

    Frozen parameters are not saved, because they equal those of the untrained student. If the process is killed at any
    moment, the previous checkpoint is still complete. `loss_modes` says how the losses are computed
    (`step.loss_modes`), and `figures` are what the callbacks have added up for the next row of the log.

    Raises UserError on every rank if a rank cannot write.
    """
    world = World.current()
    target = folder / "checkpoints" / f"step-{step}"

    def make_empty() -> None:
        if target.exists():
            shutil.rmtree(target)
        target.mkdir(parents=True)

    on_main(make_empty)
    entries = gather_objects(on_every(partial(_write, engine, target)))

    def complete() -> None:
        state = {"counters": counters(engine), "skipped_steps": engine.skipped_steps}
        files = {name: values for entry in entries for name, values in entry.items()}
        about = {
            "format": _FORMAT,
            "step": step,
            "ranks": world.size,
            "state": state,
            "parameters": _count_trained(engine),
        }
        kinds = sorted({fragment.kind for fragment in fragments(engine)})
        log = file_entry(folder / METRICS_LOG) if (folder / METRICS_LOG).is_file() else None
        of_training = {"log": log, "loss_modes": loss_modes, "figures": figures or {}}
        write_json(target / MANIFEST, {**about, "kinds": kinds, "files": files, **of_training})
        sync(target / MANIFEST)
        sync(target)  # its name in its folder too, before another checkpoint is removed
        newest = [checkpoint.folder for checkpoint in checkpoints(folder) if checkpoint.damage is None][-keep:]
        for _, old in _folders(folder):  # a folder without a manifest is what a kill has left
            if old not in newest:
                shutil.rmtree(old)

    on_main(complete)


def load_checkpoint(engine: Any, folder: Path) -> Checkpoint | None:
    """Load the newest checkpoint that is not damaged; None if there is none. Every rank must call this function.

    A damaged checkpoint is named in a warning and moved out of the way. Raises UserError if no checkpoint is whole, or
    it is of another student.
    """
    newest = _newest_whole(folder)
    if newest is not None:

        def check_parameters() -> None:
            own, saved = _count_trained(engine), newest.manifest["parameters"]
            differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
            if differing:
                raise UserError(
                    f"{newest.folder}: it is of another student, first in {differing[0]}; choose another output_dir"
                )

        on_every(check_parameters)
        if set(newest.manifest["kinds"]) - {WEIGHT}:
            # A new optimizer has no moments yet, so there is nothing to write the saved ones into.
            create_state(engine)
        with restoring(engine):
            on_every(partial(_restore, fragments(engine), newest))
        state = newest.manifest["state"]
        set_counters(engine, state["counters"])
        engine.skipped_steps = state["skipped_steps"]
        # DeepSpeed finds by its own counters where a step ends, and what its log says.
        engine.global_steps = newest.step
        engine.global_samples = newest.step * engine.train_batch_size()
        engine.micro_steps = newest.step * engine.gradient_accumulation_steps()
    return newest


def _count_trained(engine: Any) -> dict[str, int]:
    """Return the number of elements of each trained parameter, also of those that ZeRO-3 shards."""
    named = engine.module.named_parameters()
    return {
        name: int(getattr(parameter, "ds_numel", parameter.numel()))
        for name, parameter in named
        if parameter.requires_grad
    }


def _write(engine: Any, target: Path) -> dict[str, dict[str, Any]]:
    """Write this rank's fragments; returns {file name: its entry in the manifest}."""
    world = World.current()
    # Without ZeRO every rank holds the same, and one copy is enough.
    if engine.zero_optimization_stage() == 0 and not world.is_main:
        return {}
    file = target / f"rank-{world.rank:05d}.safetensors"
    tensors = {
        # A copy, because fragments are parts of the same memory, which safetensors refuses to write.
        f"{fragment.kind}/{fragment.start}/{fragment.name}": fragment.read().to("cpu", copy=True)
        for fragment in fragments(engine)
    }
    try:
        save_file(tensors, file)
        # The manifest says that the file is there, so it is on the disk first.
        sync(file)
        return {file.name: file_entry(file)}
    except (OSError, SafetensorError) as error:
        raise write_error(file, error, sum(tensor.nbytes for tensor in tensors.values())) from error


def _newest_whole(folder: Path) -> Checkpoint | None:
    world = World.current()
    damaged: list[Checkpoint] = []

    def put_aside() -> None:
        for checkpoint in damaged:
            # An earlier checkpoint of this step may have been put aside already.
            names = (
                checkpoint.folder.with_name(f"damaged-{checkpoint.folder.name}{f'-{n}' if n else ''}") for n in count()
            )
            checkpoint.folder.rename(next(name for name in names if not name.exists()))

    # Rank 0 alone lists the folder: on a network file system the ranks may see different files.
    for candidate in reversed(on_main(lambda: checkpoints(folder))):
        damage = candidate.damage
        if damage is None:  # the ranks share the files
            share = slice(world.rank, None, world.size)
            damage = entries_damage(candidate.folder, candidate.manifest["files"], share)
        wrong = next((message for message in gather_objects(damage) if message is not None), None)
        if wrong is None:
            on_main(put_aside)
            return candidate
        damaged.append(candidate)
        warn_main(f"{wrong}: the checkpoint of step {candidate.step} is damaged and is not used")
    if damaged:
        raise UserError(f"{folder / 'checkpoints'}: no checkpoint is whole; remove the folder to start the run again")
    return None


def _restore(wanted: list[Fragment], checkpoint: Checkpoint) -> None:
    """Write the values of this rank's fragments, whatever parts they were saved in."""
    parts: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    with ExitStack() as opened:
        for name in checkpoint.manifest["files"]:
            file = opened.enter_context(safe_open(checkpoint.folder / name, framework="pt"))
            for key in file.keys():  # noqa: SIM118 (not a dict)
                kind, begin, parameter = key.split("/", 2)  # as `_write` names them
                # A slice is read from the disk only where a fragment takes something of it.
                parts.setdefault((kind, parameter), []).append((int(begin), file.get_slice(key)))
        # A fragment of this rank may lie across several of those that other ranks, stages or buckets have saved.
        for fragment in wanted:
            values, filled, end = None, 0, fragment.start + fragment.numel
            for start, saved in parts.get((fragment.kind, fragment.name), []):
                first, last = max(start, fragment.start), min(start + saved.get_shape()[0], end)
                if first < last:
                    part = saved[first - start : last - start]
                    values = torch.empty(fragment.numel, dtype=part.dtype) if values is None else values
                    values[first - fragment.start : last - fragment.start] = part
                    filled += last - first
            if values is None or filled != fragment.numel:
                raise UserError(
                    f"{checkpoint.folder}: it lacks the {fragment.kind} of {fragment.name}: it is of another optimizer "
                    "or student; choose another output_dir"
                )
            fragment.write(values)
