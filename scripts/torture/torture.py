"""Tortures the commands and prints a page of figures: kills, signals, full disks, lost servers, long runs.

    scripts/torture.sh               # under 30 minutes on two cores
    scripts/torture.sh --quick       # about a minute
    scripts/torture.sh --only kills --seed 1 --case 17     # one case again, as a failure names it

Every case is drawn from the seed and its number, so a failure can be repeated. Exit code 1 if there is any failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import linear_regression

import psutil
from torture_faults import SECTIONS
from torture_results import Outcome, counted
from torture_runs import Shop

from support import PATIENCE, RankServer, logged

WARM = 0.25
"""Share of the steps before the slope counts: allocators and caches have their size then."""
LIMITS = {"bytes of memory": 2e6, "open files": 0.5, "threads": 0.5}
"""The most that a thousand steps may add."""
_LONGEST_STEP = 0.1
"""Seconds of a step on a busy machine."""

CASES = {"kills": (6, 110), "signals": (2, 30), "disk": (4, 48), "servers": (2, 20)}
"""How many each section has with --quick, and without."""


def memory(shop: Shop, steps: int) -> Outcome:
    """Train for so many steps, logging each, validating and saving, and sample the process meanwhile."""
    run, often = shop.folder / "memory", max(1, steps // 20)
    settings = {"train.steps": steps, "train.log_every": 1, "train.save_every": often, "train.validate_every": often}
    settings |= {"data.valid": "embedded:valid", "scoring.models": "[]", "output_dir": run}
    samples: dict[int, tuple[int, int, int]] = {}
    log, end = run / "metrics.jsonl", time.monotonic() + max(PATIENCE, steps * _LONGEST_STEP)
    with shop.server() as server:
        job = server.start([*shop.settings.split(), *(f"--{key}={value}" for key, value in settings.items())])
        while not job.is_over() and time.monotonic() < end:
            time.sleep(0.25)
            with suppress(psutil.Error, FileNotFoundError, IndexError):  # before its start, or after its end
                process = psutil.Process(job.group).children()[0]
                step = log.read_bytes().count(b"\n")
                samples.setdefault(step, (process.memory_info().rss, process.num_fds(), process.num_threads()))
        done = job.wait(0)
    name = f"memory{'' if steps >= 10_000 else ' --quick'} ({steps:,} steps)"  # begins with the options that repeat it
    if done.returncode != 0 or len(samples) < 10:
        return Outcome([], [f"{name}: exit code {done.returncode}, {len(samples)} samples: {done.stderr[-300:]}"])
    outcome = Outcome([("memory", f"{steps:,} steps, {len(samples)} samples")], [])
    warm = [step for step in samples if step >= WARM * steps]
    for place, (what, limit) in enumerate(LIMITS.items()):
        values = [sample[place] for sample in samples.values()]
        rate = linear_regression([step / 1000 for step in warm], [samples[step][place] for step in warm]).slope
        figure = f"{min(values):,} to {max(values):,}, {rate:+,.3f} a thousand steps"
        outcome.figures.append((f"  {what}", figure))
        if rate > limit:
            outcome.failures.append(f"{name}: {what}: {figure}")
    # The log has a line a step, and all lines the same fields: so it grows by no more than its lines.
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    quarter = len(lines) // 4
    first, last = (sum(map(len, part)) / quarter for part in (lines[:quarter], lines[-quarter:]))
    figure = f"{len(lines):,} lines, {first:.0f} bytes a line in the first quarter, {last:.0f} in the last"
    outcome.figures.append(("  metrics.jsonl", figure))
    if logged(run, "step") != list(range(json.loads(lines[0])["step"], steps + 1)) or last > 1.05 * first:
        outcome.failures.append(f"{name}: metrics.jsonl: {figure}")
    events = sum(file.stat().st_size for file in run.glob("tensorboard/*"))
    outcome.figures.append(("  TensorBoard", f"{events / steps:.0f} bytes a step"))
    return outcome


def page(outcomes: Sequence[Outcome], seconds: float, seed: int) -> str:
    """All figures, then all failures with the commands that repeat them."""
    figures, failures = (list(chain(*parts)) for parts in zip(*outcomes, strict=True))
    width = max((len(what) for what, _ in figures), default=0)
    lines = [f"Torture with seed {seed} in {seconds / 60:.1f} minutes", ""]
    lines += [f"{what:{width}}  {value}" for what, value in figures]
    lines += ["", f"{len(failures)} failures" + (":" if failures else "")]
    return "\n".join([*lines, *(f"  scripts/torture.sh --seed {seed} --only {failure}" for failure in failures)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each section, about a minute")
    parser.add_argument(
        "--only", choices=(*CASES, "memory"), action="append", help="this section alone; can be repeated"
    )
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn")
    parser.add_argument("--case", type=int, help="this case alone; needs --only")
    arguments = parser.parse_args()
    if arguments.case is not None and not arguments.only:
        parser.error("--case needs --only: a number is that of a section's case")
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    os.environ["LLMDISTILL_CACHE"] = str(folder / "tokens-of-runs")
    servers = [RankServer(Path(tempfile.mkdtemp(dir=folder))) for _ in range(min(2, os.cpu_count() or 1))]
    shop = Shop(folder, servers, seed=arguments.seed)
    sections = arguments.only or (*CASES, "memory")
    with ThreadPoolExecutor(len(servers)) as pool:
        if "memory" in sections:  # first, as it takes longest
            long_run = pool.submit(memory, shop, 200 if arguments.quick else 10_000)
        cases = {}
        for name in CASES:
            if name in sections:
                numbers = range(CASES[name][not arguments.quick]) if arguments.case is None else [arguments.case]
                cases[name] = pool.map(partial(SECTIONS[name], shop), numbers)
        outcomes = [counted(name, list(of_section)) for name, of_section in cases.items()]
        if "memory" in sections:
            outcomes.append(long_run.result())
    print(page(outcomes, time.monotonic() - began, arguments.seed))
    if any(outcome.failures for outcome in outcomes):
        print(f"The folders of failures are in {folder}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
