"""Checks the machine that a run is launched on: libraries, compiler, GPU, communication and disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from llmdistill.config.machine import GPUS, find_gpu
from llmdistill.errors import UserError, install_command
from llmdistill.files import byte_size, check_writable, nearest_folder
from llmdistill.losses.fused.triton import OLDEST_TRITON, available
from llmdistill.runtime.devices import has_compiler, installed_versions

_LIBRARIES = ("torch", "transformers", "deepspeed", "safetensors")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    state: Literal["ok", "warning", "failure"]
    what: str
    """What was checked."""
    said: str
    """The result in words."""
    remedy: str | None = None
    """What to do about it; None if nothing is to be done."""


def print_finding(finding: Finding) -> None:
    """Print a finding on one line, and what to do about it on the next."""
    from rich.console import Console
    from rich.text import Text

    color = {"ok": "green", "warning": "yellow", "failure": "bold red"}[finding.state]
    line = Text.assemble((f"{finding.state:8}", color), f" {finding.what:26} {finding.said}")
    console = Console()
    console.print(line, soft_wrap=True)
    if finding.remedy is not None:
        console.print(f"{'':8} {'':26} -> {finding.remedy}", soft_wrap=True, markup=False, highlight=False)


def check_environment(folder: Path, needed_bytes: int | None) -> Iterator[Finding]:
    """Check this machine for a run that writes so many bytes (None: not known) to a folder, which need not exist."""
    for check in (libraries, compiler, gpus, communication, kernels):
        yield check()
    yield disk(folder, needed_bytes)


def libraries() -> Finding:
    """Whether the libraries of a run are installed, and in which versions."""
    versions = installed_versions(_LIBRARIES)
    missing = [name for name in _LIBRARIES if name not in versions]
    if missing:
        return Finding("failure", "libraries", f"{', '.join(missing)} missing", f"install them: {install_command()}")
    return Finding("ok", "libraries", ", ".join(f"{name} {number}" for name, number in versions.items()))


def compiler() -> Finding:
    """Whether there are the launcher and a C++ compiler, which few runs need."""
    if shutil.which("deepspeed") is None:
        remedy = "activate the environment that DeepSpeed is installed in"
        return Finding("failure", "launcher and compiler", "the deepspeed launcher is not on the path", remedy)
    if not has_compiler():
        remedy = "for train.compile and for an optimizer on the CPU (offload) install g++, or name a compiler in CXX"
        return Finding("warning", "launcher and compiler", "there is no C++ compiler", remedy)
    return Finding("ok", "launcher and compiler", os.environ.get("CXX", "c++"))


def gpus() -> Finding:
    """Which GPUs there are."""
    if not torch.cuda.is_available():
        remedy = "for GPUs install their driver and the CUDA build of PyTorch"
        return Finding("warning", "GPU", "none: a run uses the CPU, in fp32", remedy)
    names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    said = f"{len(names)} x {names[0].name}, {names[0].total_memory / 1e9:.0f} GB"
    if not torch.cuda.is_bf16_supported():
        return Finding("warning", "GPU", f"{said}, without bf16", "a run uses fp32; bf16 needs an A100 or later")
    kind = find_gpu(names[0].name, names[0].total_memory)
    if kind is not None:
        said += f", {GPUS[kind]['tflops']:g} TFLOP/s in bf16, {GPUS[kind]['memory_bandwidth']:g} GB/s"
    return Finding("ok", "GPU", said)


def communication() -> Finding:
    """Whether the ranks can talk to each other: by NCCL on GPUs, else by gloo."""
    backend = "NCCL" if torch.cuda.is_available() else "gloo"
    if torch.distributed.is_backend_available(backend.lower()):
        return Finding("ok", "communication", backend)
    return Finding("failure", "communication", f"PyTorch lacks {backend}", "install a build of PyTorch that has it")


def kernels() -> Finding:
    """Whether the fused losses run in Triton; only GPUs need it."""
    if not torch.cuda.is_available():
        return Finding("ok", "fused losses", "in blocks on the CPU")
    if available("cuda"):
        return Finding("ok", "fused losses", "in Triton")
    oldest = ".".join(map(str, OLDEST_TRITON))
    said = f"without Triton's kernels: Triton {oldest} cannot be imported, or the GPU is older than the A100"
    remedy = f"on an A100 or later install triton>={oldest}; without the kernels the losses take more time and memory"
    return Finding("warning", "fused losses", said, remedy)


def disk(folder: Path, needed_bytes: int | None) -> Finding:
    """Whether the disk has room for a run."""
    there = nearest_folder(folder)
    try:
        check_writable(folder, "output_dir")
    except UserError as error:
        said, _, remedy = str(error).partition("; ")
        return Finding("failure", "disk", said, remedy or "give another --output_dir")
    free = shutil.disk_usage(there).free
    said = f"{byte_size(free)} free at {there}"
    if needed_bytes is None:
        return Finding("ok", "disk", said)
    said += f", of which the run needs about {byte_size(needed_bytes)}"
    if free < needed_bytes:
        return Finding("failure", "disk", said, "free some, give another --output_dir, or lower train.keep_checkpoints")
    return Finding("ok", "disk", said)
