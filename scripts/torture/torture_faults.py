"""Kills, signals and failing disks: the same command again ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from torture_child import Fault, phase_of
from torture_results import Case, Tally, differences, left_behind, logged_steps
from torture_runs import ROOT, SCENARIOS, Done, Scenario, Shop, in_parallel, runs, verdict, wait_until

from support import environment, launch_command

# SIGKILL at every phase of every command

_CALLS = {"training": 5, "saving": 3, "caching": 5, "generating": 6, "comparing": 4}
"""How often a phase's mark comes at least."""
_LONGEST = 0.3
"""Seconds after a mark."""


class Slot(NamedTuple):
    phase: str
    scenario: Scenario
    ranks: int
    victim: str
    """rank 0, rank 1, or launcher."""
    moment: str
    """change or mark."""


def slots() -> list[Slot]:
    """Every phase with every victim and both kinds of moments, in turn."""
    found = []
    for scenario in SCENARIOS.values():
        for phase in scenario.phases:
            for ranks in scenario.ranks:
                for victim in ("rank 0",) if ranks < 2 else ("rank 0", "rank 1", "launcher"):
                    moments = ("mark",) if victim == "launcher" else ("change", "mark")
                    found += [Slot(phase, scenario, ranks, victim, moment) for moment in moments]
    random.Random(0).shuffle(found)  # so that the first few are of every kind
    return found


def draw(shop: Shop, slot: Slot, dice: random.Random) -> Fault:
    """A kill of a slot's victim in its phase."""
    rank = 1 if slot.victim == "rank 1" else 0
    changes = shop.changes(slot.scenario, slot.ranks, rank) if slot.moment == "change" else []
    # What a comparison changes itself is all of the comparing.
    fitting = [n for n, change in enumerate(changes, 1) if slot.phase in (phase_of(change), "comparing")]
    if fitting:
        return Fault("kill", rank=rank, change=dice.choice(fitting), torn=dice.random() < 0.5)
    kind = "launcher" if slot.victim == "launcher" else "kill"
    delay = dice.choice((0.0, dice.uniform(0, _LONGEST)))
    return Fault(kind, rank=rank, mark=slot.phase, call=dice.randint(1, _CALLS.get(slot.phase, 1)), delay=delay)


def kill(shop: Shop, number: int) -> Case:
    """Kill once, half of the time once more in another phase, and repeat the command to its end."""
    dice, every = shop.random("kills", number), slots()
    slot = every[number % len(every)]
    others = [each for each in every if (each.scenario, each.ranks) == (slot.scenario, slot.ranks)]
    drawn = [slot, dice.choice(others)] if dice.random() < 0.5 else [slot]
    ranks = f"{max(1, slot.ranks)} rank(s)"
    case = Case(number, f"{slot.scenario.name}, {ranks}, {slot.victim}")

    def work(folder: Path) -> list[str]:
        run = partial(shop.run, slot.scenario, folder, ranks=slot.ranks)
        for each in drawn:
            done = run(fault=draw(shop, each, dice))
            if done.struck is None:
                break
            case.struck += 1
            case.counts += [("by phase", each.phase), ("by victim", f"{slot.victim} of {ranks}")]
            case.what += f", {done.struck}"
            case.grace = max(case.grace, done.grace)
        wrong = repeated(shop, slot.scenario, slot.ranks, folder)
        reference = shop.reference(slot.scenario, slot.ranks)
        case.counts += [("left behind", Path(name).name) for name in left_behind(reference, folder)]
        if not differences(reference, folder):
            case.counts.append(("bit-equal results", ranks))
        return wrong

    return case.attempt(shop.folder / "kills" / str(number), work)


def repeated(shop: Shop, scenario: Scenario, ranks: int, folder: Path) -> list[str]:
    """Give the command again; what is wrong then with its end or with the folder."""
    done = shop.run(scenario, folder, ranks=ranks)
    return [done.reason] if done.code != 0 else verdict(shop, scenario, ranks, folder)


def kills(shop: Shop, numbers: Sequence[int]) -> Tally:
    return Tally.of("kills", in_parallel(shop, [partial(kill, shop, number) for number in numbers]))


# SIGTERM and SIGINT to one process, as a scheduler or a hand sends them, also through DeepSpeed's own launcher

_CODES = {"SIGTERM": 143, "SIGINT": 130}
_GRACE = 20.0
"""Seconds within which everything must have ended."""
_LAUNCHED = (
    ("SIGTERM", "the command", False),
    ("SIGTERM", "the launcher", False),
    ("SIGTERM", "rank 1", False),
    ("SIGINT", "the command", True),
)
"""A signal, who gets it, and whether it is sent again a second later."""


def interrupt(shop: Shop, number: int) -> Case:
    """A signal to one rank at a mark, and the command again."""
    dice, scenario = shop.random("signals", number), SCENARIOS["train"]
    name, ranks = ("SIGTERM", "SIGINT")[number % 2], 1 + number // 2 % 2
    phase = ("training", "training", "saving", "scoring", "factorizing")[number // 4 % 5]
    call = dice.randint(1, {"training": 5, "saving": 3}.get(phase, 1))
    rank, delay = dice.randrange(ranks), dice.choice((0.0, dice.uniform(0, 0.1)))
    fault = Fault(name, rank=rank, mark=phase, call=call, delay=delay)
    case = Case(number, f"{name} to rank {rank} of {ranks} at {phase} {call}")

    def work(folder: Path) -> list[str]:
        done, wrong = shop.run(scenario, folder, ranks=ranks, fault=fault), []
        case.struck, case.grace = int(done.struck is not None), done.grace
        if case.struck:
            said = [line for line in done.errors.splitlines() if line.startswith("error: ")]
            if (done.code, len(said), "Traceback" in done.errors) != (_CODES[name], 1, False):
                wrong.append(f"exit code {done.code}, said {said}")
            logged, saved = _logged_and_saved(folder / "run")
            if logged > saved and "after step" in done.errors:
                wrong.append(f"step {logged} is lost: {saved} is saved")
        return wrong + repeated(shop, scenario, ranks, folder)

    return case.attempt(shop.folder / "signals" / str(number), work)


def _logged_and_saved(run: Path) -> tuple[int, int]:
    """The last step of the log and that of the last checkpoint; 0 without any."""
    logged = logged_steps(run) if (run / "metrics.jsonl").is_file() else []
    return max(logged, default=0), max((int(each.name[5:]) for each in run.glob("checkpoints/step-*")), default=0)


def launched(shop: Shop, number: int) -> Case:
    """A signal to one process of `deepspeed llmdistill/train.py` on two ranks, when the training goes on.

    The victim is the command itself, the launcher that it starts, or a rank.
    """
    name, victim, again = _LAUNCHED[number - 1000]
    case = Case(number, f"{name} to {victim} under deepspeed{', twice' if again else ''}")
    long = ["--train.steps=100000", "--train.save_every=null", "--train.log_every=1"]

    def work(folder: Path) -> list[str]:
        with (folder / "output").open("w") as output:
            command = psutil.Popen(
                launch_command(*SCENARIOS["train"].arguments(shop, folder), *long, ranks=2),
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell lets what it starts in the background ignore interrupts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        try:
            wait_until(lambda: _logged_and_saved(folder / "run")[0] >= 3, "the training did not begin", seconds=240)
            (launcher,) = command.children()
            ranks = launcher.children()
            met = {"the command": command, "the launcher": launcher, "rank 1": ranks[-1]}[victim]
            began = time.monotonic()
            for _ in range(2 if again else 1):
                with suppress(psutil.NoSuchProcess):
                    met.send_signal(signal.Signals[name])
                time.sleep(1.0 if again else 0.0)
            # The launcher puts ranks into groups of their own.
            wait_until(lambda: not any(runs(each) for each in [command, *ranks]), "it still ran after the signal")
            code = command.wait()
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in [*command.children(recursive=True), command]:
                    each.kill()
            command.wait()
        case.grace, case.struck = time.monotonic() - began, 1
        case.counts.append((case.what, f"exit code {code} after {case.grace:.1f} s"))
        logged, saved = _logged_and_saved(folder / "run")
        if case.grace > _GRACE or code == 0 or (not again and logged != saved):
            said = (folder / "output").read_text()[-300:]
            return [f"exit code {code} after {case.grace:.1f} s; step {saved} is saved of {logged}; {said}"]
        return []

    return case.attempt(shop.folder / "signals" / str(number), work)


def signals(shop: Shop, numbers: Sequence[int]) -> Tally:
    """The cases with these numbers; those from 1000 on are of DeepSpeed's own launcher."""
    jobs = [partial(launched if number >= 1000 else interrupt, shop, number) for number in numbers]
    return Tally.of("signals", in_parallel(shop, jobs))


# A disk that is full, read-only or failing at any change: one sentence, and the run goes on when it is well again

_SMALL = 400
"""Kilobytes of a file system that the run does not fit into, as it says before it starts."""


def fail(shop: Shop, number: int) -> Case:
    """Let a change fail, and all after it; then repeat the command on a disk that works."""
    dice = shop.random("disk", number)
    scenario = list(SCENARIOS.values())[number % len(SCENARIOS)]
    ranks, kind = scenario.ranks[0], dice.choice(("full", "full", "read-only", "failing"))
    changes = shop.changes(scenario, ranks, 0)
    place = dice.randint(1, len(changes))
    phase = phase_of(changes[place - 1])
    case = Case(number, f"{scenario.name}, {kind} at change {place} ({phase}: {' '.join(changes[place - 1])})")

    def work(folder: Path) -> list[str]:
        done, wrong = shop.run(scenario, folder, ranks=ranks, fault=Fault(kind, change=place)), []
        if done.struck is not None:
            case.struck, case.counts = 1, [("by kind", kind)]
            if done.code == 0 and phase != "scoring":
                wrong += [f"it ended with 0: {each}" for each in verdict(shop, scenario, ranks, folder)]
        if "Traceback" in done.said:
            wrong.append(f"a traceback: {done.reason}")
        return wrong + repeated(shop, scenario, ranks, folder)

    return case.attempt(shop.folder / "disk" / str(number), work)


def fill(shop: Shop, kilobytes: int) -> Case:
    """A file system for the run's folder that has no room, is filled while the run writes, read-only, and well again.

    So many kilobytes are left free when the run has written its first row.
    """
    case = Case(kilobytes, f"a file system, filled up to {kilobytes} kB while the run writes")

    def work(folder: Path) -> list[str]:
        if not _mount(folder, f"size={_SMALL}k"):
            return []
        run, filler = partial(shop.run, SCENARIOS["train"], folder, ranks=1), folder / "filler"

        def fill_when_it_writes() -> None:
            wait_until((folder / "run" / "metrics.jsonl").is_file, "the run wrote nothing")
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - 1000 * kilobytes))

        try:
            wrong = _not_refused(run(), "free some")
            _mount(folder, "remount,size=64m")
            done = run(watch=lambda _: threading.Thread(target=fill_when_it_writes, daemon=True).start())
            case.struck, case.counts = int(done.code != 0), [("by kind", "really full")]
            wrong += _not_refused(done, "no space left on device")
            filler.unlink()
            _mount(folder, "remount,ro")
            wrong += _not_refused(run(), "read-only")
            _mount(folder, "remount,rw")
            return wrong + repeated(shop, SCENARIOS["train"], 1, folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)

    return case.attempt(shop.folder / "disk" / f"full-{kilobytes}", work)


def _not_refused(done: Done, why: str) -> list[str]:
    is_refused = done.code == 2 and why in done.errors and "Traceback" not in done.said
    return [] if is_refused else [f"not refused by “{why}”: {done.reason}"]


def _mount(folder: Path, options: str) -> bool:
    """Whether a file system in memory could be mounted: that needs the administrator's rights."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def disk(shop: Shop, numbers: Sequence[int], sizes: Sequence[int]) -> Tally:
    """Injected faults with these numbers, and real file systems that are filled up to so many kB."""
    jobs = [*(partial(fail, shop, number) for number in numbers), *(partial(fill, shop, size) for size in sizes)]
    return Tally.of("disk", in_parallel(shop, jobs))
