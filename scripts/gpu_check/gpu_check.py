"""Checks and measures the package on this machine's GPUs in one go, in under 9 minutes.

    scripts/gpu_check.sh                      # all parts; without a GPU their small forms, on the CPU
    scripts/gpu_check.sh --only zero --only memory
    WHEELS=wheels scripts/gpu_check.sh        # installs the wheels of a folder first, without any network

Writes gpu_check.json and gpu_check.md into --output after each part. The page is a table that docs/performance.md can
take as it is. Each part runs in a process of its own and is ended after its time; none stops the others. What is
missing (a GPU, Triton, DeepSpeed, TRL, pytest) is named, and what needs it is left out. The exit code is 1 if a part
failed or ran out of time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # no installation is needed

import torch
from benching import heard, say
from benching_table import Line, finite
from gpu_check_parts import PARTS, ROOT, STAGES, Part, Request
from gpu_check_report import Report, Result, holds

from llmdistill.runtime.terminal import exit_code

GRACE = 10.0
"""Seconds that an ended part has to end its own processes."""
LOG_CHARACTERS = 6000
"""The most of a failed part's output that is kept."""


def missing(part: Part, device: str) -> str | None:
    """What a part needs and does not find; None if nothing is missing."""
    if part.gpu_only and device != "cuda":
        return "there is no GPU"
    absent = [name for name in part.needs if find_spec(name) is None]
    return f"{' and '.join(absent)} not installed" if absent else None


class Runner:
    """Runs parts in processes of their own, and ends them when it is told to."""

    def __init__(self, device: str, ranks: int, *, patience: float) -> None:
        """`patience` multiplies the parts' limits of time; the parts under DeepSpeed have a rank for each GPU."""
        self._device, self._ranks, self._patience = device, ranks, patience
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, name: str, limit: float) -> Result:
        """Run a part until its time is over, in seconds."""
        part = PARTS[name]
        absent = missing(part, self._device)
        if absent is not None:
            return Result("left out", part.about, absent)
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                part_command(name, self._device, self._ranks),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(self._device),
                start_new_session=True,
            )
            self._running.add(process)
            late = not _has_ended(process, limit)
            if late:
                end(process)
            self._running.discard(process)
            log.seek(0)
            result = read_result(part, log.read().splitlines(), code=process.returncode, late=limit if late else None)
        result.seconds = time.monotonic() - began
        return result

    def run_stages(self, names: Sequence[str], report: Report) -> None:
        """Run parts: on a GPU the rows of a stage side by side, on a CPU one after the other."""

        def row(parts: Sequence[str]) -> None:
            left = 0.0  # what a part leaves of its time goes to the next one of its row
            for name in parts:
                left += PARTS[name].seconds * self._patience
                if name in names and not self._stopped:
                    result = self.run(name, left)
                    left = max(0.0, left - result.seconds)
                    report.add(name, result)

        for rows in STAGES:
            with ThreadPoolExecutor(len(rows) if self._device == "cuda" else 1) as pool:
                done = [pool.submit(row, parts) for parts in rows]
                try:
                    for each in done:
                        each.result()
                except BaseException:
                    self.stop()  # else the pool would wait for the parts
                    raise

    def stop(self) -> None:
        self._stopped = True
        for process in list(self._running):
            end(process)


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def part_command(name: str, device: str, ranks: int) -> list[str]:
    words = [str(Path(__file__).resolve()), "--part", name, "--device", device]
    if not PARTS[name].all_gpus or ranks == 1:
        return [sys.executable, *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [sys.executable, *launcher, *words]


def environment(device: str) -> dict[str, str]:
    """Of a part's process: on the CPU no library may find a GPU."""
    path = os.pathsep.join(each for each in (str(ROOT), os.environ.get("PYTHONPATH")) if each)
    on_cpu = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **(on_cpu if device == "cpu" else {})}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        # Killed after the process has ended, too: others of its group may be left.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        _has_ended(process, GRACE)


def read_result(part: Part, output: Sequence[str], *, code: int, late: float | None) -> Result:
    """What a part's process has told, and its state; `late` is the limit of time, in seconds, that ended it."""
    result = Result("ok", part.about)
    for told in filter(None, map(heard, output)):
        if "left_out" in told:
            result.left_out.append(told["left_out"])
        else:
            told["value"] = float("nan") if told["value"] is None else told["value"]
            result.lines.append(Line(**told))
    broken = [line.measure for line in result.lines if not holds(line)]
    if late is not None:
        result.state, result.why = "out of time", f"it was ended after {late:.0f} s"
    elif code != 0:
        last = next((line for line in reversed(output) if line.strip()), "it wrote nothing")
        result.state, result.why = "failed", f"exit code {code}: {last.strip()}"
    elif broken:
        result.state, result.why = "failed", f"{len(broken)} over the limit: {', '.join(broken)}"
    elif not result.lines and result.left_out:
        result.state, result.why, result.left_out = "left out", "; ".join(result.left_out), []
    elif not result.lines:
        result.state, result.why = "failed", "it measured nothing"
    if result.failed:
        result.log = "\n".join(line for line in output if heard(line) is None)[-LOG_CHARACTERS:]
    return result


def look(name: str, request: Request) -> None:
    """Be a part's process: tell each line as it comes."""
    is_main = os.environ.get("RANK", "0") == "0"
    for found in PARTS[name].look(request):
        if is_main:
            say({"left_out": found} if isinstance(found, str) else finite(asdict(found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check"), help="folder of the results")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is a GPU")
    parser.add_argument("--only", choices=PARTS, action="append", help="one of the parts alone; may be repeated")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    arguments.device = arguments.device or ("cuda" if gpus else "cpu")
    if arguments.device == "cuda" and not gpus:
        parser.error("--device cuda: torch sees no GPU here")
    on_cpu = arguments.device == "cpu"
    if arguments.part is not None:
        return exit_code(lambda: look(arguments.part, Request(torch.device(arguments.device), small=on_cpu)))
    command = shlex.join(["scripts/gpu_check.sh", *sys.argv[1:]])
    ranks = 1 if on_cpu else gpus
    report = Report(arguments.output, command, arguments.device, ranks, list(PARTS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end the parts on the way
    Runner(arguments.device, ranks, patience=4.0 if on_cpu else 1.0).run_stages(arguments.only or list(PARTS), report)
    print(f"The page is {arguments.output / 'gpu_check.md'}, the figures in gpu_check.json beside it.")
    return int(any(result.failed for result in report.results.values()))


if __name__ == "__main__":
    sys.exit(main())
