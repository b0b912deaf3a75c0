"""The record that every report contains: the command, the hardware, the versions and the time."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import llmdistill
from llmdistill.runtime.devices import installed_versions

LIBRARIES = ("torch", "deepspeed", "transformers")


def make_record(command: str, world_size: int, libraries: Sequence[str] = LIBRARIES) -> dict[str, Any]:
    """Return the record of a run or study that ends now, as plain JSON values; `command` is what the user typed."""
    return {
        "command": command,
        "hardware": describe_hardware(world_size),
        "versions": {"llmdistill": llmdistill.__version__, **installed_versions(libraries)},
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def describe_versions(record: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in record["versions"].items())


def describe_hardware(world_size: int) -> str:
    if torch.cuda.is_available():
        return f"{world_size} x {torch.cuda.get_device_name()}"
    threads, info = torch.get_num_threads() * world_size, Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
    cpu = named or platform.processor() or platform.machine()
    ranks, cores = (f"{n} {noun}{'s' if n > 1 else ''}" for n, noun in ((world_size, "rank"), (threads, "CPU thread")))
    return f"{ranks} on {cores} ({cpu})"
