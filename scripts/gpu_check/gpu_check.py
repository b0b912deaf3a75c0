"""Checks and measures the package on this machine's GPUs in one go.

    scripts/gpu_check.sh                      # memory, waits, ZeRO and a step of each kind, in 4 minutes
    scripts/gpu_check.sh --tier all           # the kernels, their tests and the benches too, in 15 minutes
    scripts/gpu_check.sh --only zero --only memory
    scripts/gpu_check.sh --tier all --seconds 560   # as many parts as that time holds, in order of worth
    WHEELS=wheels scripts/gpu_check.sh        # installs the wheels of a folder first, without any network

Without a GPU the parts run in a small form on the CPU.

Writes gpu_check.md into --output after each part, and what the part said into NAME.log. The page is a table that
docs/performance.md can take as it is. Each part runs in a process of its own; none stops the others. A part may take
twice its own time while the parts together keep theirs. What is missing (a GPU, Triton, DeepSpeed, TRL, pytest) is
named, and what needs it is left out. The exit code is 1 if a part failed or ran out of time.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from benching import Line

from llmdistill.report.pages import markdown, write_page
from llmdistill.report.record import make_record
from llmdistill.report.tables import TitledTable
from llmdistill.runtime.distributed import process_group
from llmdistill.runtime.terminal import exit_code, quiet_libraries

ROOT = Path(__file__).resolve().parents[2]
GRACE = 10.0
"""Seconds that a part which is ended has to end its own processes."""
PATIENCE = 4.0
"""Times as long as on a GPU a part may take on a CPU."""
SLACK = 2.0
"""Times its own time after which a part is ended: others may have left some of theirs."""
LEAST = 15.0
"""Seconds without which a part is not begun: the libraries take some ten to load."""
LIBRARIES = ("torch", "triton", "deepspeed", "transformers", "trl")


@dataclass(frozen=True)
class Part:
    about: str
    """What it looks at, in a few words."""
    module: str
    """Has a function of the part's name, which yields lines; their targets are what must hold."""
    seconds: int
    """Its time on a GPU, of a machine that does nothing else."""
    gpu_only: bool = False
    all_gpus: bool = False
    """Whether it runs under DeepSpeed, on a rank for each GPU."""
    quick: bool = False
    """Whether it belongs to the tier `quick`."""


PARTS = {
    "memory": Part(
        "peak memory against the forecast of `llmdistill plan`", "gpu_check_training", 55, all_gpus=True, quick=True
    ),
    "waits": Part(
        "whether a step makes the host wait for the device", "gpu_check_training", 40, all_gpus=True, quick=True
    ),
    "zero": Part("ZeRO 1 to 3 against fp32 without DeepSpeed", "gpu_check_training", 60, all_gpus=True, quick=True),
    "llama": Part(
        "a step of KD and one of MaKD at Llama's sizes against their floor", "gpu_check_kernels", 85, quick=True
    ),
    "kernels": Part("the fused losses against those of a CPU in fp64", "gpu_check_kernels", 150),
    "tests": Part(
        "the tests of the Triton kernels, and the files with tests that need a GPU",
        "gpu_check_kernels",
        150,
        gpu_only=True,
    ),
    "steps": Part("steps by KD, MaKD and of an encoder against their floor and TRL's", "gpu_check_kernels", 180),
    "losses": Part("attention and head losses against naive ones", "gpu_check_kernels", 100),
}
"""In order of worth, so that whoever has little time has the first ones. Beside six other programs on 16 cores they
took three times as long."""
TIERS = {"quick": [name for name, part in PARTS.items() if part.quick], "all": list(PARTS)}
BUSY = 0.5
"""The load a core above which the page warns that other programs run."""


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


def run_part(name: str, gpus: int, log: Path, left: float = math.inf) -> Result:
    """Run a part in a process of its own, for `left` seconds at most; with DeepSpeed it has a rank for each GPU."""
    part, limit = PARTS[name], min(left, PARTS[name].seconds * SLACK * (1.0 if gpus else PATIENCE))
    if part.gpu_only and not gpus:
        return Result("left out", "there is no GPU")
    if left < LEAST:
        return Result("left out", "the parts before it took all the time")
    library = "deepspeed" if part.all_gpus else "pytest" if part.gpu_only else "torch"
    if find_spec(library) is None:
        return Result("left out", f"{library} is not installed")
    began, told = time.monotonic(), log.with_suffix(".jsonl")
    told.write_text("")
    with log.open("w") as output:
        process = subprocess.Popen(
            ["timeout", f"--kill-after={GRACE}", str(limit), *part_command(name, gpus, told)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
        )
        try:
            code = process.wait()
        finally:
            process.terminate()  # which timeout hands on
    late = time.monotonic() - began >= limit
    lines = [Line(**json.loads(line)) for line in told.read_text().splitlines()]
    broken = [line.measure for line in lines if not holds(line)]
    if late:
        return Result("failed", f"it was ended after {limit:.0f} s", lines)
    if code != 0:
        last = (log.read_text(errors="replace").strip() or "it wrote nothing").splitlines()[-1]
        return Result("failed", f"exit code {code}: {last.strip()}", lines)
    if broken:
        return Result("failed", f"{len(broken)} over the limit: {', '.join(broken)}", lines)
    return Result("ok", lines=lines) if lines else Result("failed", "it measured nothing")


def load_of_others() -> str:
    """What other programs do to this machine, as a clause; nothing if it is free."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]  # of the last minute, and so asked before the first part
    used = [total - free for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))]
    said = [f"a load of {load:.1f} on {cores} cores"] if load > BUSY * cores else []
    said += [f"{taken / 1e9:.1f} GB in use on GPU {gpu}" for gpu, taken in enumerate(used) if taken > 2e9]
    return " and ".join(said)


def part_command(name: str, gpus: int, told: Path) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    launcher = several if PARTS[name].all_gpus and gpus > 1 else []
    return [sys.executable, *launcher, str(Path(__file__).resolve()), "--part", name, "--told", str(told)]


def look(name: str, told: Path) -> None:
    """Be a part's process: write each line to the file as it comes; with DeepSpeed rank 0 does."""
    part = PARTS[name]
    with process_group(needed=part.all_gpus) as world:
        quiet_libraries()
        for line in getattr(import_module(part.module), name)(world):
            if world.is_main:
                with told.open("a") as file:
                    file.write(json.dumps(asdict(line)) + "\n")


# The page


def write(file: Path, results: Mapping[str, Result], command: str, gpus: int, load: str = "") -> None:
    rows = []
    for name, result in results.items():
        if result.state == "left out":
            rows.append([name, markdown(f"left out: {result.why}"), "–", "", "", ""])
        for line in result.lines:
            limit = "" if line.target is None else f"{'≥' if line.at_least else '≤'} {line.target:.3g}"
            verdict = "" if line.target is None else "ok" if holds(line) else "no"
            value = "–" if math.isnan(line.value) else f"{line.value:.3g}"
            rows.append([name, markdown(line.measure), value + line.unit, limit, verdict, markdown(line.detail)])
    title = "A check on a GPU" if gpus else "A small check on a CPU"
    states = "; ".join(f"{name} ({PARTS[name].about}): {result.state}" for name, result in results.items())
    where = "." if gpus else ". There is no GPU here, so nothing in it is about one."
    warnings = [f"{name}: failed: {result.why}" for name, result in results.items() if result.state == "failed"]
    if load:
        warnings.insert(0, f"other programs ran: {load}, so that times, and what was ended for them, mean little")
    write_page(
        file,
        "page.md.j2",
        title=title,
        table=TitledTable(title, ["part", "measure", "value", "limit", "kept", "detail"], rows),
        legend=markdown(states + where),
        warnings=[markdown(text) for text in warnings],
        record=make_record(command, max(gpus, 1), LIBRARIES),
    )


def check(folder: Path, names: Sequence[str], command: str, gpus: int, seconds: float = math.inf) -> dict[str, Result]:
    """Run parts one after the other, all in so many seconds, and write the page after each."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    results: dict[str, Result] = {}
    load = load_of_others()
    if load:
        print(f"Other programs run here ({load}): the parts may take longer than their limits.", flush=True)
    for name in names:
        began = time.monotonic()
        result = results[name] = run_part(name, gpus, folder / f"{name}.log", end - began)
        print(f"{result.state:<12} {name:<14} {time.monotonic() - began:5.0f} s  {result.why}".rstrip(), flush=True)
        write(folder / "gpu_check.md", results, command, gpus, load)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), help="folder of the results")
    tiers = "quick: what matters most, in 4 minutes; all: everything, in 15 (default: %(default)s)"
    parser.add_argument("--tier", choices=TIERS, default="quick", help=tiers)
    parser.add_argument("--only", choices=PARTS, action="append", help="one of the parts alone; may be repeated")
    parser.add_argument(
        "--seconds", type=float, help="for all parts together (default: that of the tier; none on a CPU)"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        return exit_code(lambda: look(arguments.part, arguments.told))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end the part on the way
    command = shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]])
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names, seconds = arguments.only or TIERS[arguments.tier], arguments.seconds
    if seconds is None:
        seconds = sum(PARTS[name].seconds for name in names) if gpus and not arguments.only else math.inf
    results = check(arguments.output, names, command, gpus, seconds)
    print(f"The page is {arguments.output / 'gpu_check.md'}, with what each part said beside it.")
    return int(any(result.state == "failed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
