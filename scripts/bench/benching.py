"""What the benches share: rows in fresh processes that take turns, ratios, memory above the models, and the table.

A row is one piece of work, described by a dictionary. Each row has a process with a fixed number of threads, which
builds what it needs, works twice to warm up, and waits for orders. The rows of a comparison are asked in turn, ABAB...,
the order turned round every time, so that the noise of a shared machine hits all of them alike. A ratio of times is the
median of the ratios of the rounds.

Memory above the models is the peak during one more call, less what the process holds right before it: weights,
optimizer state and inputs, gradients set to None, whatever is free handed back to the system. Gradients are so part of
it, in all rows alike. On CUDA it is what torch's allocator has given out. On a CPU it is resident memory as Linux
counts it, in a process of its own where malloc maps every large block by itself; this costs time, so that no clock runs
there. With --quick one process does both, which makes whatever allocates much look slower than it is.

The last line of a bench is JSON with the value of each measure.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from llmdistill.errors import UserError
from llmdistill.runtime.devices import give_back_memory

_MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
"""glibc's settings where memory is measured. From the start: large blocks that were free in the heap before would go on
being handed out from there."""


@dataclass(frozen=True)
class Work:
    """What a row's process has built."""

    call: Callable[[], object] | None
    """One call of what is measured; None for a row that has only facts. What it returns must not grow from call to
    call, and gradients must be None when it is over."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Figures that need no clock."""


Build = Callable[[dict[str, Any], torch.device], Work]
"""Of the row's description and the device."""


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    """One a round; empty where no time was asked for."""
    bytes: float = float("nan")
    """Peak above the models; NaN where it was not asked for or cannot be had."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")


def time_ratio(one: Measured, other: Measured) -> float:
    """The median of the ratios of their rounds, which were taken right after each other; NaN without any."""
    rounds = zip(one.seconds, other.seconds, strict=True)
    return statistics.median([a / b for a, b in rounds] or [float("nan")])


@dataclass(frozen=True)
class Settings:
    quick: bool
    device: str
    threads: int
    repeats: int
    clock: str = "wall"


class Row:
    """A row's process, which waits for orders until this one closes it or ends."""

    def __init__(self, build: Build, row: Mapping[str, Any], settings: Settings, *, mapped: bool = False) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, build, row, settings))
        pinned = {name: str(settings.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        # Threads wait as they do in the main job (llmdistill/train.py).
        waiting = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"), "HF_HUB_OFFLINE": "1"}
        with patch.dict(os.environ, pinned | waiting | (_MAPPED if mapped else {})):
            self._process.start()
        theirs.close()

    def order(self, what: str) -> None:
        """Order a call, whose "time" or "memory" is the next answer."""
        self._pipe.send(what)

    def answer(self) -> Any:
        """The facts at first, then a figure for each order; RuntimeError with what is known if the process failed."""
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a row's process ended with {self._process.exitcode}") from None
        if isinstance(answer, str):
            raise RuntimeError(f"a row failed:\n{answer}")
        return answer

    def close(self) -> None:
        self._pipe.close()  # which ends it
        self._process.join(2)
        self._process.kill()
        self._process.join()


def measure(
    build: Build, rows: Mapping[str, Mapping[str, Any]], settings: Settings, *, times: bool = True, memory: bool = True
) -> dict[str, Measured]:
    """Take times in turn, then memory, each from processes started for it; facts come from either.

    `rows` are descriptions by name. Raises RuntimeError if a row's process failed.
    """
    found = {name: Measured() for name in rows}
    apart = times and memory and not settings.quick and settings.device == "cpu"
    for timing, weighing in [(True, False), (False, True)] if apart else [(times, memory)]:
        with ExitStack() as stack:
            running = {
                name: stack.enter_context(closing(Row(build, row, settings, mapped=weighing)))
                for name, row in rows.items()
            }
            for name, process in running.items():
                found[name].facts |= process.answer()
            for repeat in range(-1, settings.repeats if timing else -1):
                for name in rows if repeat % 2 == 0 else reversed(rows):
                    running[name].order("time")
                    seconds = running[name].answer()
                    if repeat >= 0:  # the one before warms up
                        found[name].seconds.append(seconds)
            for name in rows if weighing else ():
                running[name].order("memory")
                found[name].bytes = running[name].answer()
    return found


def facts_of(build: Build, row: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The facts of one row of a bench, whose process is neither timed nor weighed."""
    return measure(build, {"row": row}, settings, times=False, memory=False)["row"].facts


def serve(pipe: Any, build: Build, row: dict[str, Any], settings: Settings) -> None:
    """Be a row's process: build, warm up, tell the facts, and do what is ordered; what libraries print is dropped."""
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        torch.set_num_threads(settings.threads)
        torch.manual_seed(0)
        device = torch.device(settings.device)
        work = build(row, device)
        first = None if work.call is None else work.call()
        pipe.send({**work.facts, "first": first} if isinstance(first, float) else work.facts)
        del first
        now = time.process_time if settings.clock == "processor" else time.perf_counter
        while True:
            order = pipe.recv()
            assert work.call is not None, "a row of facts alone has nothing to measure"
            if order == "memory":
                pipe.send(peak(work.call, device))
                continue
            wait(device)
            begun = now()
            work.call()
            wait(device)
            pipe.send(now() - begun)
    except EOFError:  # whoever gives the orders has ended
        pass
    except Exception:
        pipe.send(traceback.format_exc())


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(call: Callable[[], object], device: torch.device) -> float:
    """The most bytes that are held at the same time during a call, above those before it; NaN where nobody tells."""
    if device.type == "cuda":
        gc.collect()
        wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not sys.platform.startswith("linux"):
        return float("nan")
    gc.collect()
    give_back_memory()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(key: str) -> float:
    return 1024.0 * int(re.findall(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


# What a bench prints: a line for each figure with its target and whether it is met, and all of them as JSON


@dataclass(frozen=True)
class Line:
    measure: str
    value: float
    target: float | None = None
    detail: str = ""
    """What the value is made of, such as seconds on both sides."""
    unit: str = ""
    at_least: bool = False
    """Whether the target is a floor, not a ceiling."""

    def verdict(self, *, quick: bool) -> str:
        """ok, miss, or neither: targets are set for the full sizes alone."""
        if self.target is None or quick or math.isnan(self.value):
            return ""
        return "ok" if (self.value >= self.target if self.at_least else self.value <= self.target) else "MISS"


class Table:
    """The lines of a run, printed as they come."""

    def __init__(self, settings: Settings) -> None:
        self._quick, self.figures = settings.quick, dict[str, float]()
        where = torch.cuda.get_device_name() if settings.device == "cuda" else f"{settings.threads} threads"
        sizes = "quick sizes, for which the targets are not meant" if settings.quick else "full sizes"
        times = f"median of {settings.repeats} by {settings.clock} time"
        self.say(f"torch {torch.__version__}, {settings.device} ({where}), {sizes}, {times}")
        self.say(f"{'measure':<58} {'value':>9} {'target':>9} {'':<5} detail")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, line: Line) -> None:
        self.figures[line.measure] = line.value
        sign = "≥" if line.at_least else "≤"
        target = "" if line.target is None else f"{sign} {line.target:.3g}{line.unit}"
        value = f"{line.value:.2e}" if 0 < abs(line.value) < 1e-3 else f"{line.value:.3f}"
        verdict = line.verdict(quick=self._quick)
        self.say(f"{line.measure:<58} {value + line.unit:>9} {target:>9} {verdict:<5} {line.detail}")

    def time(self, measure: str, one: Measured, other: Measured, target: float | None = None) -> None:
        self.add(Line(measure, time_ratio(one, other), target, in_seconds(one, other)))

    def memory(self, measure: str, one: Measured, other: Measured, target: float | None = None) -> None:
        detail = f"{one.bytes / 1e6:.0f} MB / {other.bytes / 1e6:.0f} MB"
        self.add(Line(measure, one.bytes / other.bytes, target, detail))

    def finish(self) -> None:
        """Print the values by their measures, as one line of JSON: four digits, and null for what was not taken."""
        figures = {
            name: float(f"{value:.4g}") if math.isfinite(value) else None for name, value in self.figures.items()
        }
        print(json.dumps(figures), flush=True)


def in_seconds(one: Measured, other: Measured) -> str:
    return f"{one.median:.4g} s / {other.median:.4g} s"


# The command line


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of every bench, which may add to it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, under a minute")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, default=os.cpu_count(), help="of each row; all by default")
    parser.add_argument("--repeats", type=positive, help="timed rounds: 7, or 3 with --quick")
    clocks = "processor: the time of the processors on the row, with --threads 1 on a machine that others use too"
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help=clocks)
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[Settings, Table, argparse.Namespace]:
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    repeats = arguments.repeats or (3 if arguments.quick else 7)
    settings = Settings(arguments.quick, arguments.device, arguments.threads, repeats, arguments.clock)
    return settings, Table(settings), arguments


def run(main: Callable[[], None]) -> None:
    """Be a bench: what the package refuses, such as an input file that is missing, is one sentence, and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: give 1 or more")
    return number
