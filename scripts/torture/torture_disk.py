"""A disk that is full, read-only or failing at any change: one sentence, and the run goes on when it is well again."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torture_child import Fault, phase_of
from torture_results import Case, Tally
from torture_runs import SCENARIOS, Done, Shop, in_parallel, repeated, verdict

KINDS = ("full", "full", "read-only", "failing")


@dataclass
class Fallen(Case):
    """A case, and what came of it."""

    traceback: bool = False


def attempt(shop: Shop, number: int) -> Fallen:
    """Let a change fail, and all after it; then repeat the command on a disk that works."""
    dice = shop.random("disk", number)
    scenario = list(SCENARIOS.values())[number % len(SCENARIOS)]
    ranks, kind = scenario.ranks[0], dice.choice(KINDS)
    changes = shop.changes(scenario, ranks, 0)
    place = dice.randint(1, len(changes))
    phase = phase_of(changes[place - 1])
    case = Fallen(number, f"{scenario.name}, {kind} at change {place} ({phase}: {' '.join(changes[place - 1])})")

    def work(folder: Path) -> list[str]:
        done, wrong = shop.run(scenario, folder, ranks=ranks, fault=Fault(kind, change=place)), []
        case.struck, case.traceback = done.struck is not None, "Traceback" in done.said
        if case.struck and done.code == 0 and phase != "scoring":
            wrong += [f"it ended with 0: {each}" for each in verdict(shop, scenario, ranks, folder)]
        if case.traceback:
            wrong.append(f"a traceback: {done.reason}")
        return wrong + repeated(shop, scenario, ranks, folder)

    case.attempt(shop.folder / "disk" / str(number), work)
    return case


def really_full(shop: Shop, kilobytes: int) -> Fallen:
    """A file system for the run's folder that has no room, is filled while the run writes, read-only, and well again.

    So many kilobytes are left free when the run has written its first row.
    """
    case = Fallen(kilobytes, f"a file system, filled up to {kilobytes} kB while the run writes")

    def work(folder: Path) -> list[str]:
        if not _mount(folder, f"size={_SMALL}k"):
            return []
        run, filler = partial(shop.run, SCENARIOS["train"], folder, ranks=1), folder / "filler"
        try:
            wrong = _not_refused("too small", run(), "free some")
            _mount(folder, "remount,size=64m")
            done = run(watch=lambda _: _fill(folder, filler, kilobytes))
            case.struck, case.traceback = done.code != 0, "Traceback" in done.said
            wrong += _not_refused("full", done, "no space left on device")
            filler.unlink()
            _mount(folder, "remount,ro")
            wrong += _not_refused("read-only", run(), "read-only")
            _mount(folder, "remount,rw")
            return wrong + repeated(shop, SCENARIOS["train"], 1, folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)

    case.attempt(shop.folder / "disk" / f"full-{kilobytes}", work)
    return case


_SMALL = 400
"""Kilobytes of a file system that the run does not fit into, as it says before it starts."""


def _not_refused(disk: str, done: Done, why: str) -> list[str]:
    if done.code == 2 and why in done.errors and "Traceback" not in done.said:
        return []
    return [f"a disk that is {disk}: {done.reason}"]


def _fill(folder: Path, filler: Path, kilobytes: int) -> None:
    """Fill the disk, but for so much, when the run has written its first row."""

    def fill() -> None:
        patience = time.monotonic() + 60
        while not (folder / "run" / "metrics.jsonl").is_file() and time.monotonic() < patience:
            time.sleep(0.001)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - 1000 * kilobytes))

    threading.Thread(target=fill, daemon=True).start()


def _mount(folder: Path, options: str) -> bool:
    """Whether a file system in memory could be mounted: that needs the administrator's rights."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def disk(shop: Shop, numbers: Sequence[int], sizes: Sequence[int]) -> Tally:
    """Injected faults with these numbers, and real file systems that are filled up to so many kB."""
    jobs = [*(partial(attempt, shop, number) for number in numbers), *(partial(really_full, shop, k) for k in sizes)]
    cases: list[Fallen] = in_parallel(shop, jobs)
    tally = Tally("disk")
    struck = [each for each in cases if each.struck]
    survived = sum(all(wrong.startswith("a traceback") for wrong in each.wrong) for each in struck)
    tally.add("faults of the disk", f"{len(struck)}, of which {survived} survived")
    kinds = Counter(each.what.split(", ")[1].split()[0] for each in struck)
    tally.add("  by kind", ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    tally.add("  met by a traceback", sum(each.traceback for each in cases))
    tally.add_failures(cases)
    return tally
