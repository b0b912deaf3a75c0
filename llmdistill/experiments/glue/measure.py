"""Measures the size and the speed of the model and its baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from llmdistill.artifacts import read_result, write_result
from llmdistill.fingerprints import fingerprint
from llmdistill.models.configs import load_config
from llmdistill.models.families import family_of
from llmdistill.models.load import Head, load_model
from llmdistill.report.record import describe_hardware
from llmdistill.runtime.speed import measure_speed, parameter_split

_CPU_REPEATS, _GPU_REPEATS = 5, 20


def measure(
    models: Mapping[str, str],
    *,
    file: Path,
    speed: bool,
    batch_size: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Count the parameters by part and, if speed is True, time forward passes; one rank calls this function.

    Encoders are counted and timed without a head but with the pooler, as in the papers, and decoders with a classifier.
    The result is stored in a file and not measured again.

    Args:
        models: folders or hub names by role; the speed-ups are relative to the first model.
        file: the file of the measurement.
        speed: whether forward passes are timed.
        batch_size: number of sequences in a whole batch.
        length: number of tokens in each sequence.
        dtype: number format of the models.
        device: the device on which the models run.

    Raises:
        UserError: a model cannot be loaded, or has fewer positions than length.
    """
    asked: dict[str, Any] = {"models": {role: fingerprint(path) for role, path in models.items()}, "dtype": str(dtype)}
    if speed:
        asked |= {"batch_size": batch_size, "length": length, "hardware": describe_hardware(1)}
    kept = read_result(file, asked)
    if kept is not None:
        return kept
    loaded = {}
    for role, path in models.items():
        head: Head = "sequence" if family_of(load_config(path)).causal else "none"
        loaded[role] = load_model(path, dtype=dtype, device=device, head=head, new_head=True)
    found: dict[str, Any] = {"params": {role: parameter_split(model) for role, model in loaded.items()}}
    if speed:
        repeats = _GPU_REPEATS if device.type == "cuda" else _CPU_REPEATS
        speeds = measure_speed(loaded, batch_size=batch_size, length=length, repeats=repeats, warmup=1)
        found["speed"] = {role: asdict(value) for role, value in speeds.items()}
    return write_result(file, asked, found)
