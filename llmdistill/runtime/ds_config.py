"""The DeepSpeed configuration: the file's values, with the run's values where the file has "auto"."""

from __future__ import annotations

import copy
import json
import os
from importlib import resources
from pathlib import Path
from typing import Any

from llmdistill.config.strict import check_unique, did_you_mean, flatten
from llmdistill.errors import UserError
from llmdistill.files import read_json

NO_TIMERS: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}}
"""DeepSpeed's throughput timer waits for the device twice in every micro batch."""
SHIPPED = Path(str(resources.files("llmdistill") / "ds_configs"))
"""Folder of the configurations shipped with the package; in a checkout it is a link to ds_configs/ in its root."""


def ds_config_path(name_or_path: str) -> Path:
    """Return the file of a path, or else of a shipped configuration: zero2, zero2.json or ds_configs/zero2.json.

    Raises UserError if the file does not exist.
    """
    path = Path(name_or_path)
    if os.path.isfile(path):  # Path.is_file raises an error for a name that is too long
        return path
    shipped = SHIPPED / f"{path.name.removesuffix('.json')}.json"
    if str(path.parent) in (".", "ds_configs") and os.path.isfile(shipped):
        return shipped
    names = sorted(file.stem for file in SHIPPED.glob("*.json"))
    raise UserError(
        f"--ds_config {name_or_path}: neither a file nor a shipped configuration; shipped are {', '.join(names)}"
        + did_you_mean(path.name.removesuffix(".json"), names)
    )


def read_ds_config(path: str) -> dict[str, Any]:
    """Read a DeepSpeed configuration, from a file or a shipped one by name, without resolving "auto".

    Raises UserError if the file does not exist, is not a JSON object, or sets a part that this program owns.
    """
    file = ds_config_path(path)
    config = read_json(file, shown=path)
    check_unique(file.read_text(encoding="utf-8"), path)
    if not isinstance(config, dict):
        raise UserError(f"{path}:1: a {type(config).__name__}, not a JSON object; write DeepSpeed's settings as one")
    if "scheduler" in config:
        raise UserError(f"{path}: scheduler: the learning rate is the run's (train.schedule); remove the block")
    if _block(config, "fp16", path).get("enabled", False):
        raise UserError(f"{path}: fp16.enabled: half precision is bf16 here; remove the block and enable bf16")
    _block(config, "bf16", path)
    stage = _block(config, "zero_optimization", path).get("stage", 0)
    if stage not in (0, 1, 2, 3) or type(stage) is not int:  # True equals 1
        raise UserError(f"{path}: zero_optimization.stage is {stage!r}: give 0, 1, 2 or 3")
    return config


def is_shipped(name_or_path: str) -> bool:
    """Whether a DeepSpeed configuration is one that ships with the package, which needs no further check."""
    return ds_config_path(name_or_path).parent.samefile(SHIPPED)


def _block(config: dict[str, Any], key: str, path: str, prefix: str = "") -> dict[str, Any]:
    """Return a block of a configuration, an empty one if it is missing. Raises UserError if the value is no block."""
    block = config.get(key, {})
    if not isinstance(block, dict):
        raise UserError(
            f"{path}: {prefix}{key} is {json.dumps(block)[:60]}: expected a block such as {{...}}; fix or remove it"
        )
    return block


def resolve_ds_config(config: dict[str, Any], owned: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of a file's configuration in which each "auto" is replaced by the run's value.

    `owned` holds the run's values by dotted key, such as ``{"optimizer.params.lr": 1e-4}``. A block that the file lacks
    is added, but for tensorboard. Raises UserError if the file sets a value that differs from the run's, or has an
    "auto" for which the run has no value.
    """
    resolved = copy.deepcopy(config)
    for key, value in owned.items():
        *parents, name = key.split(".")
        if parents[:1] == ["tensorboard"] and "tensorboard" not in resolved:
            continue
        block = resolved
        for depth, parent in enumerate(parents):
            inner = _block(block, parent, path, "".join(f"{outer}." for outer in parents[:depth]))
            block = block.setdefault(parent, inner)
        given = block.get(name, "auto")
        if given == "auto":
            block[name] = value
        elif given != value:
            raise UserError(
                f"{path}: {key} is {given}, but the run says {value}: "
                'write "auto" there, or give the run the same value'
            )
    for key, value in flatten(resolved).items():
        if value == "auto":
            raise UserError(f'{path}: {key} is "auto", which the run does not set: give it a value or remove it')
    return resolved
