"""A long run: memory, open files and threads over its steps, and what each step adds to its files."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression

import psutil
from torture_results import Tally, logged_steps
from torture_runs import SCENARIOS, Shop, alive

from support import PATIENCE

WARM = 0.25
"""Share of the steps before the slope counts: allocators and caches have their size then."""
LIMITS = {"bytes of memory": 2e6, "open files": 0.5, "threads": 0.5}
"""The most that a thousand steps may add."""
_LONGEST_STEP = 0.1
"""Seconds of a step on a busy machine."""


def memory(shop: Shop, steps: int) -> Tally:
    """Train for so many steps, logging each, validating and saving, and sample the process meanwhile."""
    run = shop.folder / "memory" / "run"
    run.parent.mkdir()
    often = max(1, steps // 20)
    settings = {"train.steps": steps, "train.log_every": 1, "train.save_every": often, "train.validate_every": often}
    settings |= {"data.valid": "embedded:valid", "scoring.models": "[]"}
    samples: dict[int, tuple[int, int, int]] = {}
    over = threading.Event()
    watching: list[threading.Thread] = []

    def watch(group: int) -> None:
        watching.append(threading.Thread(target=_sample, args=(run, group, samples, over), daemon=True))
        watching[0].start()

    more = [f"--{key}={value}" for key, value in settings.items()]
    seconds = max(PATIENCE, steps * _LONGEST_STEP)
    done = shop.run(SCENARIOS["train"], run.parent, ranks=1, more=more, watch=watch, seconds=seconds)
    over.set()
    watching[0].join()
    tally = Tally("memory" if steps >= 10_000 else "memory --quick")  # the command that repeats it
    if done.code != 0 or len(samples) < 10:
        tally.failures.append(f"{tally.name} ({steps:,} steps): {done.reason}, {len(samples)} samples")
        return tally
    tally.figures.append(("memory", f"{steps:,} steps, {len(samples)} samples"))
    warm = [step for step in samples if step >= WARM * steps]
    for place, (what, limit) in enumerate(LIMITS.items()):
        values = [sample[place] for sample in samples.values()]
        rate = linear_regression([step / 1000 for step in warm], [samples[step][place] for step in warm]).slope
        figure = f"{min(values):,} to {max(values):,}, {rate:+,.3f} a thousand steps"
        tally.figures.append((f"  {what}", figure))
        if rate > limit:
            tally.failures.append(f"{tally.name} ({steps:,} steps): {what}: {figure}")
    # The log has a line a step, and all lines the same fields: so it grows by no more than its lines.
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    quarter = len(lines) // 4
    first, last = (sum(map(len, part)) / quarter for part in (lines[:quarter], lines[-quarter:]))
    figure = f"{len(lines):,} lines, {first:.0f} bytes a line in the first quarter, {last:.0f} in the last"
    tally.figures.append(("  metrics.jsonl", figure))
    if logged_steps(run) != list(range(json.loads(lines[0])["step"], steps + 1)) or last > 1.05 * first:
        tally.failures.append(f"{tally.name} ({steps:,} steps): metrics.jsonl: {figure}")
    events = sum(file.stat().st_size for file in run.glob("tensorboard/*"))
    tally.figures.append(("  TensorBoard", f"{events / steps:.0f} bytes a step"))
    return tally


def _sample(run: Path, group: int, samples: dict[int, tuple[int, int, int]], over: threading.Event) -> None:
    """Note the figures of LIMITS at the steps that are logged."""
    log = run / "metrics.jsonl"
    while not over.wait(0.25):
        processes = [each for each in alive(group) if each.pid != group]
        if log.is_file() and processes:
            step = log.read_bytes().count(b"\n")
            with suppress(psutil.NoSuchProcess):
                samples.setdefault(
                    step, (processes[0].memory_info().rss, processes[0].num_fds(), processes[0].num_threads())
                )
