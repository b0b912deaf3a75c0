"""What several tests share: starting the main job, and reading what it left."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch_command(*arguments: str, ranks: int = 1) -> list[str]:
    launcher = Path(sys.executable).with_name("deepspeed")
    flags = ["--num_gpus", str(ranks), "--master_port", str(free_port()), "--log_level", "error"]
    return [str(launcher), *flags, "llmdistill/train.py", *arguments]


def environment() -> dict[str, str]:
    # One thread a rank: sums are then taken in the same order in every run.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "student" / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
