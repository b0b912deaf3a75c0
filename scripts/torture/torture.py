"""Tortures the commands and prints a page of figures: kills, signals, flipped bytes, bad inputs, full disks, long runs.

    scripts/torture.sh               # under 30 minutes on two cores
    scripts/torture.sh --quick       # about a minute
    scripts/torture.sh --only kills --seed 1 --case 17     # one case again, as a failure names it

Every case is drawn from the seed and its number, so a failure can be repeated. Exit code 1 if there is any failure.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torture_bytes import bytes_flipped
from torture_faults import disk, kills, signals
from torture_memory import memory
from torture_results import Tally
from torture_runs import ROOT, Shop

SECTIONS = ("kills", "signals", "bytes", "disk", "inputs", "memory")


def inputs(quick: bool) -> Tally:
    """Run the property tests of all readers and parsers, which say how many inputs they tried."""
    tally = Tally("inputs")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "tests/unit/test_properties.py"],
        cwd=ROOT,
        env={**os.environ, "LLMDISTILL_CASES": "20" if quick else "400"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.search(r"[\d,]+ inputs tried.*", done.stdout)
    tally.figures.append(("inputs", said[0] if said else "none were counted"))
    if done.returncode != 0:
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        tally.failures += [f"inputs ({line[:300]})" for line in failed or [done.stdout[-300:]]]
    return tally


def sections(shop: Shop, arguments: argparse.Namespace) -> dict[str, Callable[[], Tally]]:
    quick, case = arguments.quick, arguments.case
    whole = not quick and case is None

    def numbers(short: int, long: int) -> Sequence[int]:
        return range(short if quick else long) if case is None else [case]

    return {
        "kills": lambda: kills(shop, numbers(6, 110)),
        "signals": lambda: signals(shop, [*numbers(2, 20), *(range(1000, 1004) if whole else ())]),
        "bytes": lambda: bytes_flipped(shop, case=case, limit=6 if quick else None),
        "disk": lambda: disk(shop, numbers(4, 48), (0, 300, 700) if whole else ()),
        "inputs": lambda: inputs(quick),
        "memory": lambda: memory(shop, 200 if quick else 10_000),
    }


def page(tallies: Sequence[Tally], seconds: float, seed: int) -> str:
    """All figures, then all failures with the commands that repeat them."""
    width = max(len(what) for tally in tallies for what, _ in [*tally.figures, ("", "")])
    lines = [f"Torture with seed {seed} in {seconds / 60:.1f} minutes", ""]
    for tally in tallies:
        lines += [f"{what:{width}}  {value}" for what, value in tally.figures]
    failures = [failure for tally in tallies for failure in tally.failures]
    lines += ["", f"{len(failures)} failures" + (":" if failures else "")]
    return "\n".join([*lines, *(f"  scripts/torture.sh --seed {seed} --only {failure}" for failure in failures)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases of each section, about a minute")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="this section alone; can be repeated")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn")
    parser.add_argument("--case", type=int, help="this case alone; needs --only")
    arguments = parser.parse_args()
    if arguments.case is not None and not arguments.only:
        parser.error("--case needs --only: a number is that of a section's case")
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    os.environ["LLMDISTILL_CACHE"] = str(folder / "tokens-of-runs")
    shop = Shop(folder, seed=arguments.seed, workers=min(2, os.cpu_count() or 1))
    every = sections(shop, arguments)
    try:
        with ThreadPoolExecutor(2) as pool:  # some sections need one process alone
            tallies = list(pool.map(lambda name: every[name](), arguments.only or SECTIONS))
    finally:
        shop.close()
    print(page(tallies, time.monotonic() - began, arguments.seed))
    failures = [failure for tally in tallies for failure in tally.failures]
    if failures:
        print(f"The folders of failures are in {folder}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
