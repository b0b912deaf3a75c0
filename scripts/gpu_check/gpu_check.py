"""Checks and measures the package on this machine's GPUs in one go, in under 15 minutes.

    scripts/gpu_check.sh                      # all parts; without a GPU their small forms, on the CPU
    scripts/gpu_check.sh --only zero --only memory
    WHEELS=wheels scripts/gpu_check.sh        # installs the wheels of a folder first, without any network

Writes gpu_check.md into --output after each part, and what the part said into NAME.log. The page is a table that
docs/performance.md can take as it is. Each part runs in a process of its own and is ended after its time; none stops
the others. What is missing (a GPU, Triton, DeepSpeed, TRL, pytest) is named, and what needs it is left out. The exit
code is 1 if a part failed or ran out of time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # no installation is needed

import torch
from benching import heard, say
from benching_table import Line

from llmdistill.report.pages import markdown, write_page
from llmdistill.report.record import make_record
from llmdistill.report.tables import TitledTable
from llmdistill.runtime.terminal import exit_code

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0
"""Seconds that a part which is ended has to end its own processes."""
PATIENCE = 4.0
"""Times as long as on a GPU a part may take on a CPU."""
LIBRARIES = ("torch", "triton", "deepspeed", "transformers", "trl")
OUT_OF_TIME = 124
"""Exit code of timeout (1)."""


# The parts. Each yields lines, whose targets are what must hold. What needs a library imports it only in its part's
# process.


@dataclass(frozen=True, kw_only=True)
class Part:
    about: str
    """What it looks at, in a few words."""
    look: Callable[[torch.device], Iterator[Line]]
    seconds: int
    """Its time on a GPU; then it is ended."""
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""
    gpu_only: bool = False
    all_gpus: bool = False
    """Whether it runs on a rank for each GPU."""


def kernels(device: torch.device) -> Iterator[Line]:
    from gpu_check_kernels import kernels

    yield from kernels(device)


def trained(name: str, about: str, seconds: int) -> Part:
    """A function of gpu_check_training, in a process group."""

    def look(_: torch.device) -> Iterator[Line]:
        import gpu_check_training

        from llmdistill.runtime.distributed import process_group
        from llmdistill.runtime.terminal import quiet_libraries

        with process_group() as world:
            quiet_libraries()
            yield from getattr(gpu_check_training, name)(world)

    return Part(about=about, look=look, seconds=seconds, needs=("deepspeed",), all_gpus=True)


def tests(_: torch.device) -> Iterator[Line]:
    import pytest

    unit = ROOT / "tests" / "unit"
    files = [file for file in unit.rglob("test_*.py") if 'reason="needs a GPU"' in file.read_text(encoding="utf-8")]
    words = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    code = pytest.main([*words, *map(str, sorted(files)), str(unit / "losses" / "fused")])
    yield Line("exit code of pytest", float(code), 0, f"{len(files)} files, and those of the kernels")


def steps(device: torch.device) -> Iterator[Line]:
    for step in ("kd", "makd", "encoder", "packed"):  # one after the other, so that a limit leaves what is done
        yield from bench("bench_step.py", device, "--peers", "--only", step)


def bench(script: str, device: torch.device, *arguments: str) -> Iterator[Line]:
    """Run a bench, and yield its figures. They have no limits here: its targets are for CPUs."""
    small = ("--quick", "--repeats", "1") if device.type == "cpu" else ()
    command = [sys.executable, str(ROOT / "scripts" / "bench" / script), "--device", device.type, *small, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}")
    found: Mapping[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    yield from (Line(name, math.nan if value is None else value) for name, value in found.items())


PARTS = {
    "kernels": Part(about="the fused losses against plain ones in fp64", look=kernels, seconds=180),
    "zero": trained("zero", "ZeRO 1 to 3 against fp32 without DeepSpeed", 80),
    "waits": trained("waits", "whether a step makes the host wait for the device", 40),
    "memory": trained("memory", "peak memory against the forecast of `llmdistill plan`", 60),
    "tests": Part(
        about="the tests of the Triton kernels, and the files with tests that need a GPU",
        look=tests,
        seconds=180,
        needs=("pytest", "deepspeed"),
        gpu_only=True,
    ),
    "steps": Part(
        about="steps by KD, MaKD and of an encoder against their floor, and TRL's GKD trainer", look=steps, seconds=180
    ),
    "losses": Part(
        about="attention and head losses against naive ones", look=partial(bench, "bench_losses.py"), seconds=100
    ),
}


# Their processes


@dataclass
class Result:
    state: Literal["ok", "failed", "left out"]
    why: str = ""
    """Why it was left out or failed."""
    lines: list[Line] = field(default_factory=list)


def holds(line: Line) -> bool:
    """Whether a figure keeps its limit; NaN keeps none."""
    return line.target is None or line.verdict(quick=False) == "ok"


def run_part(name: str, device: str, ranks: int, log: Path) -> Result:
    """Run a part in a process of its own until its time is over; with DeepSpeed it has a rank for each GPU."""
    part, limit = PARTS[name], PARTS[name].seconds * (1.0 if device == "cuda" else PATIENCE)
    if part.gpu_only and device != "cuda":
        return Result("left out", "there is no GPU")
    if absent := [library for library in part.needs if find_spec(library) is None]:
        return Result("left out", f"{' and '.join(absent)} not installed")
    path = os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH")) if each)
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["timeout", f"--kill-after={GRACE}", str(limit), *part_command(name, device, ranks)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **on_cpu},
        )
        try:
            code = process.wait()
        finally:
            process.terminate()  # which timeout hands on
    said = log.read_text(errors="replace").splitlines()
    lines = [Line(**told) for told in map(heard, said) if told is not None]
    broken = [line.measure for line in lines if not holds(line)]
    if code == OUT_OF_TIME:
        return Result("failed", f"it was ended after {limit:.0f} s", lines)
    if code != 0:
        last = next((line for line in reversed(said) if line.strip()), "it wrote nothing")
        return Result("failed", f"exit code {code}: {last.strip()}", lines)
    if broken:
        return Result("failed", f"{len(broken)} over the limit: {', '.join(broken)}", lines)
    return Result("ok", lines=lines) if lines else Result("failed", "it measured nothing")


def part_command(name: str, device: str, ranks: int) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    launcher = several if PARTS[name].all_gpus and ranks > 1 else []
    return [sys.executable, *launcher, str(Path(__file__).resolve()), "--part", name, "--device", device]


def look(name: str, device: str) -> None:
    """Be a part's process: tell each line as it comes."""
    for line in PARTS[name].look(torch.device(device)):
        if os.environ.get("RANK", "0") == "0":
            say(asdict(line))


# The page


def write(file: Path, results: Mapping[str, Result], command: str, device: str, ranks: int) -> None:
    on_gpu, rows = device == "cuda", []
    for name, result in results.items():
        if result.state == "left out":
            rows.append([name, markdown(f"left out: {result.why}"), "–", "", "", ""])
        for line in result.lines:
            limit = "" if line.target is None else f"{'≥' if line.at_least else '≤'} {line.target:.3g}"
            verdict = "" if line.target is None else "ok" if holds(line) else "**no**"
            value = "–" if math.isnan(line.value) else f"{line.value:.3g}"
            rows.append([name, markdown(line.measure), value + line.unit, limit, verdict, markdown(line.detail)])
    title = "A check on a GPU" if on_gpu else "A small check on a CPU"
    states = "; ".join(f"{name} ({PARTS[name].about}): {result.state}" for name, result in results.items())
    where = "." if on_gpu else ". There is no GPU here, so nothing in it is about one."
    failed = [f"{name}: failed: {result.why}" for name, result in results.items() if result.state == "failed"]
    write_page(
        file,
        "page.md.j2",
        title=title,
        table=TitledTable(title, ["part", "measure", "value", "limit", "kept", "detail"], rows),
        legend=markdown(states + where),
        warnings=[markdown(text) for text in failed],
        record=make_record(command, ranks, LIBRARIES),
    )


def check(folder: Path, names: Sequence[str], command: str, device: str, ranks: int) -> dict[str, Result]:
    """Run parts one after the other, and write the page after each."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {}
    for name in names:
        began = time.monotonic()
        result = results[name] = run_part(name, device, ranks, folder / f"{name}.log")
        print(f"{result.state:<12} {name:<14} {time.monotonic() - began:5.0f} s  {result.why}".rstrip(), flush=True)
        write(folder / "gpu_check.md", results, command, device, ranks)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), help="folder of the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is a GPU")
    parser.add_argument("--only", choices=PARTS, action="append", help="one of the parts alone; may be repeated")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device: str = arguments.device or ("cuda" if gpus else "cpu")
    if device == "cuda" and not gpus:
        parser.error("--device cuda: torch sees no GPU here")
    if arguments.part is not None:
        return exit_code(lambda: look(arguments.part, device))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end the part on the way
    command = shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]])
    results = check(arguments.output, arguments.only or list(PARTS), command, device, gpus if device == "cuda" else 1)
    print(f"The page is {arguments.output / 'gpu_check.md'}, with what each part said beside it.")
    return int(any(result.state == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
