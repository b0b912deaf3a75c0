"""Bytes that are flipped in what commands read: each is named, made good, or without any effect."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torture_child import Fault
from torture_results import PAGES, Case, Tally, differences, move_records
from torture_runs import SCENARIOS, Done, Scenario, Shop, in_parallel


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

    def run(self, shop: Shop, folder: Path) -> Done:
        """Give the command on one rank, or without a launcher, over a copy of the folder."""
        return shop.run(self.scenario, folder, ranks=min(1, self.scenario.ranks[0]), more=self.more(folder))


def made_once(name: str, fill: Callable[[Shop, Path], object]) -> Callable[[Shop], Path]:
    """Returns a folder that is filled when it is first asked for."""

    def make(shop: Shop) -> Path:
        folder = shop.folder / "damaged" / name
        if not folder.exists():
            folder.mkdir(parents=True)
            fill(shop, folder)
        return folder

    return make


def reference_of(scenario: Scenario) -> Callable[[Shop], Path]:
    return lambda shop: shop.reference(scenario, 1)


def unfinished(shop: Shop, folder: Path) -> None:
    """What a kill in step 5, behind the checkpoint of step 4, leaves."""
    done = shop.run(SCENARIOS["train"], folder, ranks=1, fault=Fault("kill", mark="training", call=5))
    assert done.struck is not None, done.said


def unfinished_cache(shop: Shop, folder: Path) -> None:
    """What a kill in the last third of the shards leaves."""
    changes = [change[0] for change in shop.changes(SCENARIOS["cache"], 1, 0)]
    late = [n for n, event in enumerate(changes, 1) if event == "write"][-2]
    done = shop.run(SCENARIOS["cache"], folder, ranks=1, fault=Fault("kill", change=late))
    assert done.struck is not None, done.said


def calibrated(shop: Shop, folder: Path) -> None:
    """A calibration without the run that has made it."""
    shutil.copytree(shop.reference(SCENARIOS["weighted"], 1) / "cal", folder / "cal")


def tokens(shop: Shop, folder: Path) -> None:
    """The tokens of a run's data, in a folder of its own."""
    assert shop.run(SCENARIOS["train"], folder, ranks=1, more=own_tokens(folder)).code == 0
    shutil.rmtree(folder / "run")


def own_tokens(folder: Path) -> Sequence[str]:
    return [f"--data.cache_dir={folder / 'tokens'}"]


TRAIN, CACHE, GENERATE = (SCENARIOS[name] for name in ("train", "cache", "generate"))
FROM_CACHE = replace(
    TRAIN,
    arguments=lambda shop, folder: [*TRAIN.arguments(shop, folder), "--method=kd", f"--teacher.cache={folder}/cache"],
)
EXPORT = replace(
    SCENARIOS["export"],
    arguments=lambda _, folder: ["export", "--to=dense", f"--model={folder}/run/student", f"--output={folder}/dense"],
)
TARGETS = (
    Damaged("finished run, same command", reference_of(TRAIN), TRAIN, finished=True, spare="run/checkpoints"),
    Damaged("finished run, export", reference_of(TRAIN), EXPORT, within="run/student"),
    Damaged("unfinished run", made_once("unfinished", unfinished), TRAIN),
    Damaged("finished cache, training from it", reference_of(CACHE), FROM_CACHE, within="cache"),
    Damaged("finished cache, same command", reference_of(CACHE), CACHE, finished=True),
    Damaged("unfinished cache", made_once("unfinished-cache", unfinished_cache), CACHE),
    Damaged("calibration folder", made_once("calibrated", calibrated), SCENARIOS["weighted"], within="cal"),
    Damaged("answers, same command", reference_of(GENERATE), GENERATE, finished=True),
    Damaged("tokens of the data", made_once("tokens", tokens), TRAIN, more=own_tokens, within="tokens"),
)


def places(shop: Shop, targets: Sequence[Damaged]) -> list[tuple[Damaged, str, int]]:
    """For each file of each target two bytes of it, by the dice of the seed; plain JSON has no hash."""
    found = []
    for number, target in enumerate(targets):
        dice, folder = shop.random("bytes", number), target.make(shop)
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0):
            name = str(file.relative_to(folder))
            if name.startswith(target.within) and "tfevents" not in name and file.suffix != ".json":
                found += [(target, name, dice.randrange(file.stat().st_size)) for _ in range(2)]
    return found


def flip(shop: Shop, number: int, target: Damaged, name: str, place: int, expected: Path, plain: Done) -> Case:
    """Damage a copy of a target's folder and give its command; `plain` is what that says of the undamaged one."""
    case = Case(number, f"{target.name}: {name}, byte {place}", struck=1)

    def work(folder: Path) -> list[str]:
        shutil.copytree(target.make(shop), folder, dirs_exist_ok=True)
        file = folder / name
        content = bytearray(file.read_bytes())
        content[place] ^= 1 << shop.random("bit", number).randrange(8)
        file.write_bytes(content)
        move_records(folder, target.make(shop), besides=file)
        damaged = file.read_bytes()
        done = target.run(shop, folder)
        repaired = not file.is_file() or file.read_bytes() != damaged
        changed = any(not each.startswith(name) for each in differences(expected, folder))
        # Lines that the command does not print over the undamaged folder.
        new, parent = _lines(done, folder) - _lines(plain, expected), str(Path(name).parent)
        must_be_named = target.finished and not (target.spare and name.startswith(target.spare))
        wrong = []
        if "Traceback" in done.said:
            outcome, wrong = "traceback", [done.reason]
        elif any(file.name in line or (parent != "." and parent in line) for line in new):
            outcome = "named"
        elif done.code != 0:
            outcome = "refused without its name"
        elif name.endswith(PAGES) and not repaired:
            outcome = "not read"
        elif changed or (must_be_named and not repaired):
            outcome, wrong = "used silently", [done.reason]
        else:
            outcome = "repaired" if repaired else "no effect"
        case.counts += [("outcomes", outcome), (target.name, outcome)]
        return wrong

    return case.attempt(shop.folder / "flips" / str(number), work)


def _lines(done: Done, folder: Path) -> set[str]:
    return set(done.said.replace(str(folder), "@").splitlines())


def bytes_flipped(
    shop: Shop, *, case: int | None = None, limit: int | None = None, targets: Sequence[Damaged] = TARGETS
) -> Tally:
    """Flip two bytes in every file of every target; or only the one of this number, or `limit` of them."""
    chosen = list(enumerate(places(shop, targets)))
    if case is not None:
        chosen = [chosen[case]]
    elif limit is not None:
        chosen = random.Random(shop.seed).sample(chosen, limit)
    plain: dict[str, tuple[Path, Done]] = {}
    for target in {place[0].name: place[0] for _, place in chosen}.values():
        folder = shop.folder / "plain" / target.name.replace(" ", "-")
        shutil.copytree(target.make(shop), folder)
        move_records(folder, target.make(shop))
        done = target.run(shop, folder)
        assert done.code == 0, f"{target.name}: {done.said}"
        plain[target.name] = (folder, done)
    jobs = [partial(flip, shop, number, *place, *plain[place[0].name]) for number, place in chosen]
    return Tally.of("bytes", in_parallel(shop, jobs))
