"""The DeepSpeed configuration: the file's, with the run's values where it says "auto".

Each knob has one owner. Where the file sets a number of its own and the run another, nobody can know which is
meant, so the run stops and says so.
"""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError

DEFAULT_DS_CONFIG = "ds_configs/zero2.json"
"""What a run takes that names none."""
SHIPPED = Path(str(resources.files("llmdistill") / "ds_configs"))
"""Folder of the configurations that ship with the package; in a checkout a link to ds_configs/ at its top."""


def ds_config_path(name_or_path: str) -> Path:
    """A DeepSpeed configuration's file: the one at a path, else a shipped one by its name.

    A shipped one is named zero2, zero2.json or, as in a checkout, ds_configs/zero2.json; a file that is there wins.

    Raises:
        UserError: there is no such file.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{path.name.removesuffix('.json')}.json"
    if str(path.parent) in (".", "ds_configs") and shipped.is_file():
        return shipped
    names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.json")))
    raise UserError(f"--ds_config {name_or_path}: neither a file nor a shipped configuration; shipped are {names}")


def read_ds_config(path: str) -> dict[str, Any]:
    """A DeepSpeed configuration as it stands in its file, or in the shipped one of that name.

    Raises:
        UserError: no such file, not JSON, no JSON object, or a part that this program owns.
    """
    file = ds_config_path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        line = getattr(error, "lineno", 1)
        raise UserError(
            f"{path}:{line}: not valid JSON ({getattr(error, 'msg', 'not text')}); mend the DeepSpeed configuration"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{path}:1: a DeepSpeed configuration is a JSON object, this is a {type(config).__name__}")
    if "scheduler" in config:
        raise UserError(f"{path}: scheduler: the learning rate is the run's (train.schedule); remove the block")
    if config.get("fp16", {}).get("enabled", False):
        raise UserError(f"{path}: fp16.enabled: half precision is bf16 here; remove the block and enable bf16")
    return config


def resolve_ds_config(
    config: dict[str, Any], owned: dict[str, Any], path: str, optional: tuple[str, ...] = ("tensorboard",)
) -> dict[str, Any]:
    """A copy in which each "auto" holds the run's value.

    Args:
        config: as read from the file.
        owned: the run's value by dotted key, such as ``{"optimizer.params.lr": 1e-4}``. A key of a block that the file
            does not have is added with its block, except where `optional` names the block.
        path: the file, for messages.

    Raises:
        UserError: the file sets a value that differs from the run's, or an "auto" that nobody fills.
    """
    resolved = copy.deepcopy(config)
    for key, value in owned.items():
        *parents, name = key.split(".")
        if parents and parents[0] in optional and parents[0] not in resolved:
            continue
        block = resolved
        for parent in parents:
            block = block.setdefault(parent, {})
        given = block.get(name, "auto")
        if given == "auto":
            block[name] = value
        elif not _same(given, value):
            raise UserError(
                f"{path}: {key} is {given}, but the run says {value}: "
                'write "auto" there, or give the run the same value'
            )
    for key, value in _leaves(resolved):
        if value == "auto":
            raise UserError(f'{path}: {key} is "auto", which the run does not set: give it a value or remove it')
    return resolved


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


def _leaves(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in config.items():
        key = f"{prefix}{name}"
        found += _leaves(value, f"{key}.") if isinstance(value, dict) else [(key, value)]
    return found
