"""The DeepSpeed configuration: the file's values, with the run's values where the file has "auto"."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError

DEFAULT_DS_CONFIG = "ds_configs/zero2.json"
"""The DeepSpeed configuration of a run that does not name one."""
NO_TIMERS: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}}
"""DeepSpeed's throughput timer waits for the device twice in every micro batch."""
_OPTIONAL = "tensorboard"
"""Block that a configuration gets no values for if it does not have it."""
SHIPPED = Path(str(resources.files("llmdistill") / "ds_configs"))
"""Folder of the configurations shipped with the package; in a checkout it is a link to ds_configs/ in its root."""


def ds_config_path(name_or_path: str) -> Path:
    """Return the file of a path, or else of a shipped configuration: zero2, zero2.json or ds_configs/zero2.json.

    Raises UserError if the file does not exist.
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
    """Read a DeepSpeed configuration, from a file or a shipped one by name, without resolving "auto".

    Raises UserError if the file does not exist, is not a JSON object, or sets a part that this program owns.
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


def resolve_ds_config(config: dict[str, Any], owned: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a copy of a file's configuration in which each "auto" is replaced by the run's value.

    `owned` holds the run's values by dotted key, such as ``{"optimizer.params.lr": 1e-4}``. A block that the file lacks
    is added, unless it is optional.

    Raises:
        UserError: the file sets a value that differs from the run's, or has an "auto" for which the run has no value.
    """
    resolved = copy.deepcopy(config)
    for key, value in owned.items():
        *parents, name = key.split(".")
        if parents[:1] == [_OPTIONAL] and _OPTIONAL not in resolved:
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
