"""SIGKILL at every phase of every command: the same command again ends as if nothing had happened."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torture_child import Fault, phase_of
from torture_results import Case, Tally, differences, left_behind
from torture_runs import SCENARIOS, Scenario, Shop, in_parallel, verdict

_CALLS = {"training": 5, "saving": 3, "caching": 5, "generating": 6, "comparing": 4}
"""How often a phase's mark comes at least."""
_LONGEST = 0.3
"""Seconds after a mark."""


@dataclass(frozen=True)
class Slot:
    """What a case begins with."""

    phase: str
    scenario: Scenario
    ranks: int
    victim: str
    """rank 0, rank 1, or launcher."""
    moment: str
    """change or mark."""


@dataclass(kw_only=True)
class Kill(Case):
    """A case, and what came of it."""

    slot: Slot = field(repr=False)
    phases: list[str] = field(default_factory=list)
    """Those of the kills that struck."""
    left: list[str] = field(default_factory=list)
    is_exact: bool = False
    """Whether the results are bit-equal to the undisturbed run's."""


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


def attempt(shop: Shop, number: int) -> Kill:
    """Kill once, half of the time once more in another phase, and repeat the command to its end."""
    dice, every = shop.random("kills", number), slots()
    slot = every[number % len(every)]
    others = [each for each in every if (each.scenario, each.ranks) == (slot.scenario, slot.ranks)]
    drawn = [slot, dice.choice(others)] if dice.random() < 0.5 else [slot]
    case = Kill(number, f"{slot.scenario.name}, {slot.ranks} ranks, {slot.victim}", slot=slot)

    def work(folder: Path) -> list[str]:
        run = partial(shop.run, slot.scenario, folder, ranks=slot.ranks)
        for each in drawn:
            done = run(fault=draw(shop, each, dice))
            if done.struck is None:
                break
            case.phases.append(each.phase)
            case.what += f", {done.struck}"
            case.grace = max(case.grace, done.grace)
        if done.struck is not None or done.code != 0:
            done = run()
        if done.code != 0:
            return [done.reason]
        reference = shop.reference(slot.scenario, slot.ranks)
        case.left = left_behind(reference, folder)
        case.is_exact = not differences(reference, folder)
        return verdict(shop, slot.scenario, slot.ranks, folder)

    case.attempt(shop.folder / "kills" / str(number), work)
    return case


def kills(shop: Shop, numbers: Sequence[int]) -> Tally:
    cases: list[Kill] = in_parallel(shop, [partial(attempt, shop, number) for number in numbers])
    tally = Tally("kills")
    struck = [(case, phase) for case in cases for phase in case.phases]
    survived = sum(not case.wrong for case, _ in struck)
    tally.add("SIGKILLs", f"{len(struck)}, of which {survived} survived, in {len(cases)} runs")
    by_phase = Counter(phase for _, phase in struck)
    tally.add("  by phase", ", ".join(f"{phase} {count}" for phase, count in by_phase.items()))
    by_victim = Counter(f"{case.slot.victim} of {max(1, case.slot.ranks)}" for case, _ in struck)
    tally.add("  by victim", ", ".join(f"{victim} {count}" for victim, count in sorted(by_victim.items())))
    for ranks in (1, 2):
        own = [case for case in cases if max(1, case.slot.ranks) == ranks and not case.wrong]
        tally.add(f"  bit-equal results on {ranks} rank(s)", f"{sum(each.is_exact for each in own)} of {len(own)} runs")
    tally.add("  longest until all processes had ended", f"{max((each.grace for each in cases), default=0):.1f} s")
    kept = Counter(Path(name).name for case in cases for name in case.left)
    tally.add("  runs with files left behind", sum(bool(case.left) for case in cases))
    tally.notes += [f"left behind {count} times: {name}" for name, count in kept.most_common(8)]
    tally.add_failures(cases)
    return tally
