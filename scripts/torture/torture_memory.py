"""A long run: memory, open files and threads over its steps, and what each step adds to its files."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

import psutil
from torture_results import Tally
from torture_runs import SCENARIOS, Shop, alive

from support import PATIENCE

WARM = 0.25
"""Share of the steps before the slope counts: allocators and caches have their size then."""
GROWTH = 2e6
"""Bytes of memory a thousand steps that count as flat."""
_LONGEST_STEP = 0.1
"""Seconds of a step on a busy machine."""


@dataclass
class Sample:
    """A process at a step."""

    step: int
    resident: int
    files: int
    threads: int


def slope(samples: list[Sample], of: str) -> float:
    """Least squares: units a thousand steps, after the warm share."""
    warm = [each for each in samples if each.step >= WARM * samples[-1].step]
    return linear_regression([each.step / 1000 for each in warm], [getattr(each, of) for each in warm]).slope


def memory(shop: Shop, steps: int) -> Tally:
    """Train for so many steps, logging each, validating and saving, and sample the process meanwhile."""
    folder, scenario = shop.folder / "memory", SCENARIOS["train"]
    folder.mkdir()
    often = max(1, steps // 20)
    settings = {"train.steps": steps, "train.log_every": 1, "train.save_every": often, "train.validate_every": often}
    settings |= {"data.valid": "embedded:valid", "scoring.models": "[]"}
    samples: list[Sample] = []
    over = threading.Event()
    watching = list[threading.Thread]()

    def watch(group: int) -> None:
        watching.append(threading.Thread(target=_sample, args=(folder / "run", group, samples, over), daemon=True))
        watching[0].start()

    began = time.monotonic()
    more = [f"--{key}={value}" for key, value in settings.items()]
    done = shop.run(scenario, folder, ranks=1, more=more, watch=watch, seconds=max(PATIENCE, steps * _LONGEST_STEP))
    over.set()
    watching[0].join()
    tally = Tally("memory" if steps >= 10_000 else "memory --quick")  # the command that repeats it
    if done.code != 0 or len(samples) < 10:
        tally.failures.append(f"{tally.name} ({steps:,} steps): {done.reason}, {len(samples)} samples")
        return tally
    tally.add("steps", f"{samples[-1].step:,} in {time.monotonic() - began:.0f} s, {len(samples)} samples")
    growth = slope(samples, "resident")
    tally.add("  memory", f"{samples[-1].resident / 1e6:.1f} MB, {growth / 1e3:+.1f} kB a thousand steps")
    if growth > GROWTH:
        tally.failures.append(f"{tally.name} ({steps:,} steps): {growth / 1e6:.2f} MB a thousand steps")
    for what in ("files", "threads"):
        rate = slope(samples, what)
        values = [getattr(each, what) for each in samples]
        tally.add(f"  {what}", f"{min(values)} to {max(values)}, {rate:+.3f} a thousand steps")
        if rate > 0.5:
            tally.failures.append(f"{tally.name} ({steps:,} steps): {rate:.2f} more {what} a thousand steps")
    _logs(folder / "run", steps, tally)
    return tally


def _logs(run: Path, steps: int, tally: Tally) -> None:
    """The log has a line a step, and all lines the same fields: so it grows by no more than its lines."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    quarter = len(lines) // 4
    first, last = (sum(map(len, part)) / quarter for part in (lines[:quarter], lines[-quarter:]))
    tally.add(
        "  metrics.jsonl",
        f"{len(lines):,} lines, {first:.0f} bytes a line in the first quarter, {last:.0f} in the last",
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    if [row["step"] for row in rows] != list(range(rows[0]["step"], steps + 1)) or last > 1.05 * first:
        tally.failures.append(f"{tally.name} ({steps:,} steps): {len(rows)} rows of the log, {last:.0f} bytes each")
    events = sum(file.stat().st_size for file in run.glob("tensorboard/*"))
    tally.add("  TensorBoard", f"{events / steps:.0f} bytes a step")


def _sample(run: Path, group: int, samples: list[Sample], over: threading.Event) -> None:
    log, seen, place = run / "metrics.jsonl", 0, 0
    while not over.wait(0.25):
        if not log.is_file():
            continue
        with log.open("rb") as file:
            file.seek(place)
            new = file.read()
        seen, place = seen + new.count(b"\n"), place + len(new)
        processes = [each for each in alive(group) if each.pid != group]
        if not processes or (samples and seen == samples[-1].step):
            continue
        process = processes[0]
        with suppress(psutil.NoSuchProcess), process.oneshot():
            samples.append(Sample(seen, process.memory_info().rss, process.num_fds(), process.num_threads()))
