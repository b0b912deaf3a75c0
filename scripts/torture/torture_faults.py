"""Kills, signals, failing disks and lost servers: the same command again ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torture_child import Fault, phase_of
from torture_results import Case, differences, left_behind
from torture_runs import SCENARIOS, Done, Scenario, Shop

from llmdistill.errors import ServerLost

from support import logged

Judge = Callable[[Done, Path], list[str]]
"""Tells what is wrong after a fault, of what it did to the command, and of the folder."""


def disturbed(
    shop: Shop,
    section: str,
    number: int,
    scenario: Scenario,
    ranks: int,
    faults: Iterable[Fault],
    judge: Judge = lambda *_: [],
) -> Case:
    """Run a command once for each fault, and then to its end, in a folder that is kept if something is wrong."""
    of_ranks, folder = f"{max(1, ranks)} rank(s)", shop.folder / section / str(number)
    case = Case(number, f"{scenario.name}, {of_ranks}")
    folder.mkdir(parents=True)
    try:
        for fault in faults:
            done = shop.run(scenario, folder, ranks=ranks, fault=fault)
            if done.struck is None:
                break
            victim = fault.kind if fault.kind in ("launcher", "server") else f"rank {fault.rank}"
            phase = "training" if fault.kind == "server" else fault.mark or phase_of(done.struck)
            case.struck, case.grace = case.struck + 1, max(case.grace, done.grace)
            case.what += f", {fault.kind} to {victim} at {done.struck}"
            case.counts += [("by kind", fault.kind), ("by phase", phase), ("by victim", f"{victim} of {of_ranks}")]
            case.wrong += judge(done, folder)
        done, reference = shop.run(scenario, folder, ranks=ranks), shop.reference(scenario, ranks)
        case.wrong += [done.reason] if done.code != 0 else shop.verdict(scenario, ranks, folder)
        case.counts += [("left behind", Path(name).name) for name in left_behind(reference, folder)]
        if not differences(reference, folder):
            case.counts.append(("bit-equal results", of_ranks))
    except (AssertionError, RuntimeError) as error:
        case.wrong.append(str(error)[:300])
    if not case.wrong:
        shutil.rmtree(folder)
    print(f"{section}: {case}"[:400], file=sys.stderr, flush=True)
    return case


def refused(done: Done, code: int) -> list[str]:
    """What is wrong with a command that must end with this code and say why in one sentence."""
    said = [line for line in done.errors.splitlines() if line.startswith("error: ")]
    right = (done.code, len(said), "Traceback" in done.errors) == (code, 1, False)
    return [] if right else [f"exit code {done.code}, said {said}"]


# SIGKILL at every phase of every command, half of the time twice

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
    dice, every = shop.random("kills", number), slots()
    slot = every[number % len(every)]
    others = [each for each in every if (each.scenario, each.ranks) == (slot.scenario, slot.ranks)]
    drawn = [slot, dice.choice(others)] if dice.random() < 0.5 else [slot]
    faults = (draw(shop, each, dice) for each in drawn)
    return disturbed(shop, "kills", number, slot.scenario, slot.ranks, faults)


# SIGTERM and SIGINT to one process, as a scheduler or a hand sends them

_CODES = {"SIGTERM": 143, "SIGINT": 130}


def stop(shop: Shop, number: int) -> Case:
    """A signal to one rank of a training at a mark or shortly after it."""
    dice, train = shop.random("signals", number), SCENARIOS["train"]
    every = [each for each in slots() if (each.scenario, each.moment) == (train, "mark") and each.victim != "launcher"]
    slot = every[number // 2 % len(every)]
    fault = draw(shop, slot, dice)
    fault = replace(fault, kind=("SIGTERM", "SIGINT")[number % 2], delay=fault.delay / 3)  # the command goes on

    def judge(done: Done, folder: Path) -> list[str]:
        wrong = refused(done, _CODES[fault.kind])
        if "after step" in done.errors:
            last = logged(folder / "run", "step")[-1]
            if not (folder / "run" / "checkpoints" / f"step-{last}").is_dir():
                wrong.append(f"step {last} is lost")
        return wrong

    return disturbed(shop, "signals", number, train, slot.ranks, [fault], judge)


# A disk that is full, read-only or failing at any change: one sentence, and the run goes on when it is well again


def fail(shop: Shop, number: int) -> Case:
    """Let a change fail, and all after it; then repeat the command on a disk that works."""
    dice = shop.random("disk", number)
    scenario = list(SCENARIOS.values())[number % len(SCENARIOS)]
    ranks, kind = scenario.ranks[0], dice.choice(("full", "full", "read-only", "failing"))
    fault = Fault(kind, change=dice.randint(1, len(shop.changes(scenario, ranks, 0))))

    def judge(done: Done, folder: Path) -> list[str]:
        wrong = [f"a traceback: {done.reason}"] if "Traceback" in done.said else []
        if done.code == 0 and phase_of(done.struck) != "scoring":
            wrong += [f"it ended with 0: {each}" for each in shop.verdict(scenario, ranks, folder)]
        return wrong

    return disturbed(shop, "disk", number, scenario, ranks, [fault], judge)


# A server that dies between two answers: the run waits, saves its last step and ends, and goes on with another server


def lose(shop: Shop, number: int) -> Case:
    dice, served = shop.random("servers", number), [each for each in SCENARIOS.values() if each.served]
    scenario, ranks, fault = served[number % 2], number // 2 % 2 + 1, Fault("server", call=dice.randint(1, 19))
    return disturbed(shop, "servers", number, scenario, ranks, [fault], lambda done, _: refused(done, ServerLost.code))


SECTIONS = {"kills": kill, "signals": stop, "disk": fail, "servers": lose}
