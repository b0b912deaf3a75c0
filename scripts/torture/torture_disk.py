"""A disk that is full, read-only or failing at any change: one sentence, and the run goes on when it is well again."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torture_child import Fault, phase_of
from torture_runs import SCENARIOS, Done, Shop, Tally, in_parallel, repeated, verdict

KINDS = ("full", "full", "read-only", "failing")


@dataclass
class Outcome:
    """What came of a case."""

    number: int
    what: str
    wrong: list[str] = field(default_factory=list)
    traceback: bool = False
    struck: bool = False


def attempt(shop: Shop, number: int) -> Outcome:
    """Let a change fail, and all after it; then repeat the command on a disk that works."""
    dice = shop.random("disk", number)
    scenario = list(SCENARIOS.values())[number % len(SCENARIOS)]
    ranks, kind = scenario.ranks[0], dice.choice(KINDS)
    changes = shop.changes(scenario, ranks, 0)
    place = dice.randint(1, len(changes))
    phase = phase_of(changes[place - 1])
    outcome = Outcome(number, f"{scenario.name}, {kind} at change {place} ({phase}: {' '.join(changes[place - 1])})")
    folder = shop.folder / "disk" / str(number)
    folder.mkdir(parents=True)
    try:
        done = shop.run(scenario, folder, ranks=ranks, fault=Fault(kind, change=place))
        outcome.struck = done.struck is not None
        outcome.traceback = "Traceback" in done.said
        if outcome.struck and done.code == 0 and phase != "scoring":
            outcome.wrong += [f"it ended with 0: {each}" for each in verdict(shop, scenario, ranks, folder)]
        if outcome.traceback:
            outcome.wrong.append(f"a traceback: {done.reason}")
        outcome.wrong += repeated(shop, scenario, ranks, folder)
    except (AssertionError, RuntimeError) as error:
        outcome.wrong.append(str(error)[:300])
    if not outcome.wrong:
        shutil.rmtree(folder)
    return outcome


def really_full(shop: Shop, kilobytes: int) -> Outcome:
    """A file system for the run's folder that has no room, is filled while the run writes, read-only, and well again.

    Args:
        shop: the place of work.
        kilobytes: what is left free when it has written its first row.
    """
    scenario = SCENARIOS["train"]
    outcome = Outcome(kilobytes, f"a file system, filled up to {kilobytes} kB while the run writes")
    folder = shop.folder / "disk" / f"full-{kilobytes}"
    folder.mkdir(parents=True)
    if not _mount(folder, f"size={_SMALL}k"):
        return outcome
    filler = folder / "filler"
    try:
        done = shop.run(scenario, folder, ranks=1)
        outcome.wrong += _not_refused("too small", done, "free some")
        _mount(folder, "remount,size=64m")
        done = shop.run(scenario, folder, ranks=1, watch=lambda _: _fill(folder, filler, kilobytes))
        outcome.struck, outcome.traceback = done.code != 0, "Traceback" in done.said
        outcome.wrong += _not_refused("full", done, "no space left on device")
        filler.unlink()
        _mount(folder, "remount,ro")
        outcome.wrong += _not_refused("read-only", shop.run(scenario, folder, ranks=1), "read-only")
        _mount(folder, "remount,rw")
        outcome.wrong += repeated(shop, scenario, 1, folder)
    except (AssertionError, RuntimeError) as error:
        outcome.wrong.append(str(error)[:300])
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
    return outcome


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
    outcomes: list[Outcome] = in_parallel(
        shop, [*(partial(attempt, shop, number) for number in numbers), *(partial(really_full, shop, k) for k in sizes)]
    )
    tally = Tally("disk")
    struck = [each for each in outcomes if each.struck]
    survived = sum(all(wrong.startswith("a traceback") for wrong in each.wrong) for each in struck)
    tally.add("faults of the disk", f"{len(struck)}, of which {survived} survived")
    kinds = Counter(each.what.split(",")[1].split()[0] if "," in each.what else "small file system" for each in struck)
    tally.add("  by kind", ", ".join(f"{kind} {count}" for kind, count in kinds.items()))
    tally.add("  met by a traceback", sum(each.traceback for each in outcomes))
    for each in outcomes:
        if each.wrong:
            tally.failures.append(f"disk --case {each.number} ({each.what}): {'; '.join(each.wrong[:3])}")
    return tally
