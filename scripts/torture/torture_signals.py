"""SIGTERM and SIGINT to one process, as a scheduler or a hand sends them, also through DeepSpeed's own launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torture_child import Fault
from torture_results import logged_steps
from torture_runs import ROOT, SCENARIOS, Shop, Tally, in_parallel, repeated

from support import environment, launch_command

CODES = {"SIGTERM": 143, "SIGINT": 130}
GRACE = 20.0
"""Seconds within which everything must have ended."""


@dataclass
class Outcome:
    """What came of a case."""

    number: int
    what: str
    grace: float = 0.0
    struck: bool = False
    wrong: list[str] = field(default_factory=list)


def attempt(shop: Shop, number: int) -> Outcome:
    """A signal to one rank at a mark, and the command again."""
    dice, scenario = shop.random("signals", number), SCENARIOS["train"]
    name, ranks = ("SIGTERM", "SIGINT")[number % 2], 1 + number // 2 % 2
    phase = ("training", "training", "saving", "scoring", "factorizing")[number // 4 % 5]
    call = dice.randint(1, {"training": 5, "saving": 3}.get(phase, 1))
    fault = Fault(
        name, rank=dice.randrange(ranks), mark=phase, call=call, delay=dice.choice((0.0, dice.uniform(0, 0.1)))
    )
    outcome = Outcome(number, f"{name} to rank {fault.rank} of {ranks} at {phase} {call}")
    folder = shop.folder / "signals" / str(number)
    folder.mkdir(parents=True)
    try:
        done = shop.run(scenario, folder, ranks=ranks, fault=fault)
        outcome.struck, outcome.grace = done.struck is not None, done.grace
        if outcome.struck:
            outcome.wrong += _wrong_end(name, done.code, done.errors, folder / "run")
        outcome.wrong += repeated(shop, scenario, ranks, folder)
    except (AssertionError, RuntimeError) as error:
        outcome.wrong.append(str(error)[:300])
    if not outcome.wrong:
        shutil.rmtree(folder)
    return outcome


def _wrong_end(name: str, code: int, errors: str, run: Path) -> list[str]:
    wrong = [] if code == CODES[name] else [f"exit code {code}, not {CODES[name]}"]
    wrong += ["a traceback"] if "Traceback" in errors else []
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    wrong += [] if len(said) == 1 else [f"{len(said)} lines: {said}"]
    saved = max([int(each.name[5:]) for each in run.glob("checkpoints/step-*")], default=0)
    log = logged_steps(run)[-1] if (run / "metrics.jsonl").is_file() else 0
    return wrong + ([] if log <= saved or "after step" not in errors else [f"step {log} is lost: {saved} is saved"])


def launched(shop: Shop, number: int, name: str, victim: str, *, again: bool) -> Outcome:
    """A signal to one process of `deepspeed llmdistill/train.py` on two ranks.

    The victim is the command itself, the launcher that it starts, or a rank. `again`: the same signal a second later.
    """
    outcome = Outcome(number, f"{name} to {victim} under deepspeed{', twice' if again else ''}")
    scenario, folder = SCENARIOS["train"], shop.folder / "signals" / f"launched-{number}"
    folder.mkdir(parents=True)
    long = ["--train.steps=100000", "--train.save_every=null", "--train.log_every=1"]
    words = [*scenario.arguments(shop, folder), *long]
    command = launch_command(*words, ranks=2)
    with (folder / "out").open("w") as output, (folder / "err").open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
    try:
        _wait_for_steps(folder / "run", process)
        victims = {"the command": process.pid, "the launcher": _children(process.pid)[0]}
        ranks = _children(victims["the launcher"])
        pid = {**victims, "rank 1": ranks[-1]}[victim]
        began, number_of = time.monotonic(), signal.Signals[name]
        os.kill(pid, number_of)
        if again:
            time.sleep(1.0)
            for each in (pid,) if _runs(pid) else ():
                os.kill(each, number_of)
        process.wait(timeout=60)
        # The launcher puts ranks into groups of their own.
        while any(_runs(each) for each in ranks):
            if time.monotonic() - began > 60:
                raise RuntimeError("a rank still runs 60 seconds after the signal")
            time.sleep(0.02)
        outcome.grace, outcome.struck = time.monotonic() - began, True
        text = (folder / "err").read_text()
        saved = max([int(each.name[5:]) for each in (folder / "run").glob("checkpoints/step-*")], default=0)
        if outcome.grace > GRACE:
            outcome.wrong.append(f"it took {outcome.grace:.1f} s")
        if process.returncode == 0:
            outcome.wrong.append("exit code 0")
        if not again and logged_steps(folder / "run")[-1] != saved:
            outcome.wrong.append(f"step {saved} is saved of {logged_steps(folder / 'run')[-1]}; {text[-300:]}")
        outcome.what += f" (exit code {process.returncode})"
    except subprocess.TimeoutExpired:
        outcome.wrong.append("it still runs 60 seconds after the signal")
    except RuntimeError as error:
        outcome.wrong.append(str(error)[:300])
    finally:
        for each in (*_descendants(process.pid), process.pid):
            if _runs(each):
                os.kill(each, signal.SIGKILL)
        process.wait()
    return outcome


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets what it starts in the background ignore them


def _wait_for_steps(run: Path, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    patience = time.monotonic() + seconds
    while not (run / "metrics.jsonl").is_file() or len(logged_steps(run)) < 3:
        if process.poll() is not None or time.monotonic() > patience:
            raise RuntimeError("the training did not begin")
        time.sleep(0.05)


def _children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children")
    return [int(each) for each in found.read_text().split()] if found.is_file() else []


def _descendants(process: int) -> list[int]:
    return [each for child in _children(process) for each in (*_descendants(child), child)]


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


LAUNCHED = (
    ("SIGTERM", "the command", False),
    ("SIGTERM", "the launcher", False),
    ("SIGTERM", "rank 1", False),
    ("SIGINT", "the command", True),
)


def signals(shop: Shop, numbers: Sequence[int], *, launcher: bool) -> Tally:
    """The cases with these numbers, and those of DeepSpeed's own launcher."""
    jobs = [partial(attempt, shop, number) for number in numbers]
    if launcher:
        jobs += [
            partial(launched, shop, 1000 + n, name, victim, again=again)
            for n, (name, victim, again) in enumerate(LAUNCHED)
        ]
    outcomes: list[Outcome] = in_parallel(shop, jobs)
    tally, struck = Tally("signals"), [each for each in outcomes if each.struck]
    tally.add("signals", f"{len(struck)}, of which {sum(not each.wrong for each in struck)} ended as they must")
    longest = max(struck, key=lambda each: each.grace, default=None)
    if longest is not None:
        tally.add("  longest grace", f"{longest.grace:.1f} s ({longest.what})")
    for each in outcomes:
        if each.number >= 1000:
            tally.add(f"  {each.what}", f"{each.grace:.1f} s")
        if each.wrong:
            tally.failures.append(f"signals --case {each.number} ({each.what}): {'; '.join(each.wrong[:3])}")
    return tally
