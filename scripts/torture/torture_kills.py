"""SIGKILL at every phase of every command: the same command again ends as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torture_child import Fault, phase_of
from torture_results import differences, left_behind
from torture_runs import SCENARIOS, Done, Scenario, Shop, Tally, in_parallel, verdict

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


@dataclass
class Outcome:
    """What came of a case."""

    number: int
    slot: Slot = field(repr=False)
    kills: list[tuple[str, str]]
    """Phase and place of those that struck."""
    wrong: list[str]
    left: list[str]
    longest: float = 0.0
    """Seconds until the last process of a killed job had ended."""
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


def attempt(shop: Shop, number: int) -> Outcome:
    """Kill once, half of the time once more in another phase, and repeat the command to its end."""
    dice, every = shop.random("kills", number), slots()
    slot = every[number % len(every)]
    others = [each for each in every if (each.scenario, each.ranks) == (slot.scenario, slot.ranks)]
    drawn = [slot, dice.choice(others)] if dice.random() < 0.5 else [slot]
    folder = shop.folder / "kills" / str(number)
    folder.mkdir(parents=True)
    outcome, done = Outcome(number, slot, [], [], []), None
    try:
        for each in drawn:
            done = shop.run(slot.scenario, folder, ranks=slot.ranks, fault=draw(shop, each, dice))
            if done.struck is None:
                break
            outcome.kills.append((each.phase, done.struck))
            outcome.longest = max(outcome.longest, done.grace)
        _finish(shop, slot, folder, outcome, done)
    except (AssertionError, RuntimeError) as error:
        outcome.wrong.append(str(error)[:300])
    if not outcome.wrong:
        shutil.rmtree(folder)
    return outcome


def _finish(shop: Shop, slot: Slot, folder: Path, outcome: Outcome, done: Done | None) -> None:
    if done is None or done.struck is not None or done.code != 0:
        done = shop.run(slot.scenario, folder, ranks=slot.ranks)
    if done.code != 0:
        outcome.wrong.append(done.reason)
        return
    outcome.wrong += verdict(shop, slot.scenario, slot.ranks, folder)
    reference = shop.reference(slot.scenario, slot.ranks)
    outcome.left = left_behind(reference, folder)
    outcome.is_exact = not differences(reference, folder)


def kills(shop: Shop, numbers: Sequence[int]) -> Tally:
    """Run the cases with these numbers."""
    outcomes: list[Outcome] = in_parallel(shop, [partial(attempt, shop, number) for number in numbers])
    tally = Tally("kills")
    struck = [(outcome, phase) for outcome in outcomes for phase, _ in outcome.kills]
    survived = sum(not outcome.wrong for outcome, _ in struck)
    tally.add("SIGKILLs", f"{len(struck)}, of which {survived} survived, in {len(outcomes)} runs")
    by_phase = Counter(phase for _, phase in struck)
    tally.add("  by phase", ", ".join(f"{phase} {count}" for phase, count in by_phase.items()))
    by_victim = Counter(f"{o.slot.victim} of {max(1, o.slot.ranks)}" for o, _ in struck)
    tally.add("  by victim", ", ".join(f"{victim} {count}" for victim, count in sorted(by_victim.items())))
    for ranks in (1, 2):
        own = [outcome for outcome in outcomes if max(1, outcome.slot.ranks) == ranks and not outcome.wrong]
        tally.add(f"  bit-equal results on {ranks} rank(s)", f"{sum(o.is_exact for o in own)} of {len(own)} runs")
    tally.add("  longest until all processes had ended", f"{max((o.longest for o in outcomes), default=0):.1f} s")
    kept = Counter(Path(name).name for outcome in outcomes for name in outcome.left)
    tally.add("  runs with files left behind", sum(bool(outcome.left) for outcome in outcomes))
    tally.notes += [f"left behind {count} times: {name}" for name, count in kept.most_common(8)]
    for outcome in outcomes:
        if outcome.wrong:
            where = "; ".join(place for _, place in outcome.kills)
            tally.failures.append(
                f"kills --case {outcome.number} ({outcome.slot.scenario.name}, {outcome.slot.ranks} ranks, "
                f"{outcome.slot.victim}, {where}): {'; '.join(outcome.wrong[:4])}"
            )
    return tally
