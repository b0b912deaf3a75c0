"""The parts of gpu_check: what each looks at, what it needs, and how long it may take on a GPU.

A part is a generator of lines, whose targets are what must hold, and of texts, which say what it leaves out. Each runs
in a process of its own. What needs a library imports it only in there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benching_table import Line

if TYPE_CHECKING:
    from llmdistill.runtime.distributed import World

ROOT = Path(__file__).resolve().parents[2]
NEEDS_GPU = "needs a GPU"
"""The reason by which tests are skipped where there is none."""


@dataclass(frozen=True)
class Request:
    """What a part is asked for."""

    device: torch.device
    small: bool


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part."""

    about: str
    """What it looks at, in a few words."""
    look: Callable[[Request], Iterator[Line | str]]
    seconds: int
    """Its time on a GPU. What it leaves of it goes to the next part of its row; then it is ended."""
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""
    gpu_only: bool = False
    all_gpus: bool = False
    """Whether it runs on a rank for each GPU."""


def kernels(request: Request) -> Iterator[Line | str]:
    from gpu_check_kernels import FULL, SMALL, kernels

    yield from kernels(SMALL if request.small else FULL, request.device)


def training(name: str) -> Callable[[Request], Iterator[Line | str]]:
    """A function of gpu_check_training, in a process group."""

    def look(request: Request) -> Iterator[Line | str]:
        import gpu_check_training

        from llmdistill.runtime.distributed import process_group
        from llmdistill.runtime.terminal import quiet_libraries

        of_part: Callable[[bool, World], Iterator[Line]] = getattr(gpu_check_training, name)
        with process_group() as world:
            quiet_libraries()
            yield from of_part(request.small, world)

    return look


class Ended:
    """A plugin of pytest: keeps the tests with the reason NEEDS_GPU, or all, and counts how they ended."""

    def __init__(self, *, only_marked: bool) -> None:
        self._only_marked = only_marked
        self.names: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        def needs_gpu(item: Any) -> bool:
            return any(mark.kwargs.get("reason") == NEEDS_GPU for mark in item.iter_markers("skipif"))

        if self._only_marked:
            items[:] = filter(needs_gpu, items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self.names[report.outcome].append(report.nodeid.rpartition("/")[2])


def marked_tests(_: Request) -> Iterator[Line | str]:
    files = sorted(file for file in (ROOT / "tests" / "unit").rglob("test_*.py") if NEEDS_GPU in file.read_text())
    yield from run_tests(files, only_marked=True)


def kernel_tests(_: Request) -> Iterator[Line | str]:
    """The tests of the Triton kernels, which run in its interpreter where there is no GPU."""
    from llmdistill.losses.fused.triton import available

    if not available("cuda"):
        yield "the tests of Triton's kernels: no Triton 3.4, or a GPU older than the A100"
        return
    yield from run_tests([ROOT / "tests" / "unit" / "losses" / "fused"], only_marked=False)


def run_tests(files: Sequence[Path], *, only_marked: bool) -> Iterator[Line]:
    """Run tests in this process: none may fail, and one must pass."""
    import pytest

    ended = Ended(only_marked=only_marked)
    words = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", *map(str, files)]
    code = pytest.main(words, plugins=[ended])
    passed, skipped, failed = ended.names.values()
    detail = ", ".join([f"{len(passed)} passed", f"{len(skipped)} skipped", *failed])
    broken = code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    yield Line("tests that failed", float("nan") if broken else len(failed), 0, detail)
    yield Line("tests that passed", len(passed), 1, "", at_least=True)


def steps(request: Request) -> Iterator[Line | str]:
    """Steps of distillation against their floor, one after the other, so that a limit leaves what is done."""
    from bench_step import STEPS

    for step in STEPS:
        yield from figures(bench(request, "bench_step.py", "--only", step))


def losses(request: Request) -> Iterator[Line | str]:
    yield from figures(bench(request, "bench_losses.py"))


def trl(request: Request) -> Iterator[Line | str]:
    found = bench(request, "bench_step.py", "--only", "kd", "--peers")["kd_step"]
    beside = {key: value for key, value in found.items() if key.endswith("_over_trl")}
    if not beside:
        raise RuntimeError("TRL's row failed; the bench says why above")
    yield from figures({"kd_step": beside})


def bench(request: Request, script: str, *arguments: str) -> dict[str, Any]:
    """Run a bench, show what it writes, and return the JSON of its last line; RuntimeError where it fails."""
    sizes = ("--quick", "--repeats", "1") if request.small else ()
    words = ["--device", request.device.type, *sizes, *arguments]
    command = [sys.executable, str(ROOT / "scripts" / "bench" / script), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def figures(values: Mapping[str, Any], *names: str) -> Iterator[Line]:
    """The figures of a bench. They have no limits here: its targets are for CPUs."""
    for key, value in values.items():
        name = key.replace("_", " ")
        if isinstance(value, Mapping):
            yield from figures(value, *names, name)
        else:
            yield Line(": ".join([", ".join(names), name]), float("nan") if value is None else value, None, "")


_DEEPSPEED = ("deepspeed", "transformers")


def _trained(name: str, about: str, seconds: int) -> Part:
    return Part(about=about, look=training(name), seconds=seconds, needs=_DEEPSPEED, all_gpus=True)


PARTS = {
    "kernels": Part(about="the fused losses against plain ones in fp64", look=kernels, seconds=180),
    "zero": _trained("zero", "ZeRO 1 to 3 against fp32 without DeepSpeed", 80),
    "waits": _trained("waits", "whether a step makes the host wait for the device", 40),
    "memory": _trained("memory", "peak memory against the forecast of `llmdistill plan`", 60),
    "tests": Part(
        about="the tests that need a GPU",
        look=marked_tests,
        seconds=40,
        needs=("pytest", *_DEEPSPEED),
        gpu_only=True,
    ),
    "kernel_tests": Part(
        about="the tests of the Triton kernels", look=kernel_tests, seconds=140, needs=("pytest",), gpu_only=True
    ),
    "steps": Part(
        about="steps by KD, MaKD and of an encoder against their floor",
        look=steps,
        seconds=160,
        needs=("transformers",),
    ),
    "losses": Part(about="attention and head losses against naive ones", look=losses, seconds=110),
    "trl": Part(about="a step by KD against TRL's GKD trainer", look=trl, seconds=60, needs=("trl", "transformers")),
}

STAGES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("kernels",), ("zero", "waits", "memory"), ("tests", "kernel_tests")),
    (("steps", "losses", "trl"),),
)
"""One stage after the other. The rows of a stage run side by side, which disturbs nothing but times; only the last
stage takes times."""
