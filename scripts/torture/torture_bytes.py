"""Bytes that are flipped in what commands read: each is named, made good, or without any effect."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torture_child import Fault
from torture_results import PAGES, differences, move_records
from torture_runs import SCENARIOS, Done, Scenario, Shop, Tally, in_parallel

NAMED, REFUSED, REPAIRED, HARMLESS, UNREAD = "named", "refused without its name", "repaired", "no effect", "not read"
SILENT, TRACEBACK = "used silently", "traceback"
BAD = (SILENT, TRACEBACK)


@dataclass(frozen=True)
class Damaged:
    """A folder whose files are damaged, and the command that meets them."""

    name: str
    make: Callable[[Shop], Path]
    """Returns the undamaged folder."""
    scenario: Scenario
    """Its command, whose folder is a damaged copy."""
    more: Callable[[Path], Sequence[str]] = lambda folder: ()
    """Further arguments, of that copy."""
    within: str = ""
    """Only files whose path begins so are damaged."""
    finished: bool = False
    """Whether the command says that all of it is there: then also what it does not read must be named."""
    spare: str = ""
    """Files whose path begins so are no results, and a finished command need not read them."""


@dataclass
class Flip:
    """One byte and what came of it."""

    number: int
    target: str
    file: str
    place: int
    outcome: str = ""
    said: str = ""


_KILLED_STEP = 5


def unfinished(shop: Shop) -> Path:
    """What a kill in step 5, behind the checkpoint of step 4, leaves."""
    folder = shop.folder / "damaged" / "unfinished"
    if not folder.exists():
        folder.mkdir(parents=True)
        done = shop.run(SCENARIOS["train"], folder, ranks=1, fault=Fault("kill", mark="training", call=_KILLED_STEP))
        assert done.struck is not None, done.said
    return folder


def cached(shop: Shop) -> Path:
    """A finished cache of a teacher."""
    return shop.reference(SCENARIOS["cache"], 1)


def unfinished_cache(shop: Shop) -> Path:
    """What a kill in the last third of the shards leaves."""
    folder = shop.folder / "damaged" / "unfinished-cache"
    if not folder.exists():
        folder.mkdir(parents=True)
        changes = [change[0] for change in shop.changes(SCENARIOS["cache"], 1, 0)]
        late = [n for n, event in enumerate(changes, 1) if event == "write"][-2]
        done = shop.run(SCENARIOS["cache"], folder, ranks=1, fault=Fault("kill", change=late))
        assert done.struck is not None, done.said
    return folder


def calibrated(shop: Shop) -> Path:
    """A calibration without the run that has made it."""
    folder = shop.folder / "damaged" / "calibrated"
    if not folder.exists():
        shutil.copytree(shop.reference(SCENARIOS["weighted"], 1) / "cal", folder / "cal")
    return folder


def tokens(shop: Shop) -> Path:
    """The tokens of a run's data, in a folder of its own."""
    folder = shop.folder / "damaged" / "tokens"
    if not folder.exists():
        folder.mkdir(parents=True)
        more = (f"--data.cache_dir={folder / 'tokens'}",)
        assert shop.run(SCENARIOS["train"], folder, ranks=1, more=more).code == 0
        shutil.rmtree(folder / "run")
    return folder


TRAIN, CACHE, GENERATE = (SCENARIOS[name] for name in ("train", "cache", "generate"))
FROM_CACHE = Scenario(
    "cached",
    TRAIN.program,
    lambda shop, folder: [*TRAIN.arguments(shop, folder), "--method=kd", f"--teacher.cache={folder / 'cache'}"],
    (),
)
EXPORT = Scenario(
    "exported",
    SCENARIOS["export"].program,
    lambda shop, folder: [
        "export",
        "--to",
        "dense",
        f"--model={folder / 'run/student'}",
        f"--output={folder / 'dense'}",
    ],
    (),
    (0,),
)
TARGETS = (
    Damaged(
        "finished run, same command",
        lambda shop: shop.reference(TRAIN, 1),
        TRAIN,
        finished=True,
        spare="run/checkpoints",
    ),
    Damaged("finished run, export", lambda shop: shop.reference(TRAIN, 1), EXPORT, within="run/student"),
    Damaged("unfinished run", unfinished, TRAIN),
    Damaged("finished cache, training from it", cached, FROM_CACHE, within="cache"),
    Damaged("finished cache, same command", cached, CACHE, finished=True),
    Damaged("unfinished cache", unfinished_cache, CACHE),
    Damaged("calibration folder", calibrated, SCENARIOS["weighted"], within="cal"),
    Damaged("answers, same command", lambda shop: shop.reference(GENERATE, 1), GENERATE, finished=True),
    Damaged(
        "tokens of the data",
        tokens,
        TRAIN,
        more=lambda folder: (f"--data.cache_dir={folder / 'tokens'}",),
        within="tokens",
    ),
)


def places(shop: Shop, each: int, targets: Sequence[Damaged] = TARGETS) -> list[tuple[Damaged, str, int]]:
    """For each file of each target some bytes of it, by the dice of the seed; plain JSON has no hash."""
    found = []
    for number, target in enumerate(targets):
        dice, folder = shop.random("bytes", number), target.make(shop)
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0):
            name = str(file.relative_to(folder))
            if name.startswith(target.within) and "tfevents" not in name and file.suffix != ".json":
                found += [(target, name, dice.randrange(file.stat().st_size)) for _ in range(each)]
    return found


def flip(shop: Shop, number: int, target: Damaged, name: str, place: int, expected: Path, plain: Done) -> Flip:
    """Damage a copy of a target's folder and give its command."""
    folder = shop.folder / "flips" / str(number)
    shutil.copytree(target.make(shop), folder)
    file, found = folder / name, Flip(number, target.name, name, place)
    before = file.read_bytes()
    content = bytearray(before)
    content[place] ^= 1 << shop.random("bit", number).randrange(8)
    file.write_bytes(content)
    move_records(folder, target.make(shop), besides=file)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        os.utime(path, (1_000_000_000, path.stat().st_mtime))
    damaged = file.read_bytes()
    try:
        done = shop.run(target.scenario, folder, ranks=min(1, target.scenario.ranks[0]), more=target.more(folder))
    except (AssertionError, RuntimeError) as error:
        found.outcome, found.said = TRACEBACK, str(error)[-200:]
        return found
    found.said = done.reason
    was_read = not file.is_file() or file.read_bytes() != damaged or file.stat().st_atime > 1_000_000_001
    differs = differences(expected, folder)
    here = [each for each in differs if not each.startswith(name)]
    new = _lines(done, folder) - _lines(plain, expected)
    found.outcome = _judged(target, file, name, done, new, damaged, was_read, here)
    if found.outcome not in BAD:
        shutil.rmtree(folder)
    return found


def _judged(
    target: Damaged,
    file: Path,
    name: str,
    done: Done,
    new: set[str],
    damaged: bytes,
    was_read: bool,
    differs: list[str],
) -> str:
    """What came of a flipped byte; `new` are the lines that the command does not print over the undamaged folder."""
    if "Traceback" in done.said:
        return TRACEBACK
    folder = str(Path(name).parent)
    if any(file.name in line or (folder != "." and folder in line) for line in new):
        return NAMED
    if done.code != 0:
        return REFUSED
    if not file.is_file() or file.read_bytes() != damaged:
        return SILENT if differs else REPAIRED
    if name.endswith(PAGES):
        return UNREAD
    if target.finished and not (target.spare and name.startswith(target.spare)):
        return SILENT
    if not was_read:
        return UNREAD
    return SILENT if differs else HARMLESS


def _lines(done: Done, folder: Path) -> set[str]:
    return set(done.said.replace(str(folder), "@").splitlines())


def bytes_flipped(
    shop: Shop,
    *,
    each: int,
    numbers: Sequence[int] | None = None,
    limit: int | None = None,
    targets: Sequence[Damaged] = TARGETS,
) -> Tally:
    """Flip `each` bytes in every file of every target; or only those with these numbers, or `limit` of them."""
    every = list(enumerate(places(shop, each, targets)))
    if limit is not None:
        every = random.Random(shop.seed).sample(every, limit)
    chosen = [entry for entry in every if numbers is None or entry[0] in numbers]
    plain: dict[str, tuple[Path, Done]] = {}
    for target in {entry[1][0].name: entry[1][0] for entry in chosen}.values():
        folder = shop.folder / "plain" / target.name.replace(" ", "-")
        shutil.copytree(target.make(shop), folder)
        move_records(folder, target.make(shop))
        done = shop.run(target.scenario, folder, ranks=min(1, target.scenario.ranks[0]), more=target.more(folder))
        assert done.code == 0, f"{target.name}: {done.said}"
        plain[target.name] = (folder, done)
    flips: list[Flip] = in_parallel(
        shop, [partial(flip, shop, number, *place, *plain[place[0].name]) for number, place in chosen]
    )
    tally = Tally("bytes")
    counts = Counter(each.outcome for each in flips)
    tally.add("bytes flipped", f"{len(flips)}, of which {sum(counts[bad] for bad in BAD)} used silently or by accident")
    tally.add("  outcomes", ", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    for target in plain:
        own = Counter(each.outcome for each in flips if each.target == target)
        tally.add(f"  {target}", ", ".join(f"{outcome} {count}" for outcome, count in own.most_common()))
    for found in flips:
        if found.outcome in BAD:
            tally.failures.append(
                f"bytes --case {found.number} ({found.target}: {found.file}, byte {found.place}): {found.outcome}; "
                f"{found.said[:200]}"
            )
    return tally
