"""SIGTERM and SIGINT to one process, as a scheduler or a hand sends them, also through DeepSpeed's own launcher."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from torture_child import Fault
from torture_results import Case, Tally, logged_steps
from torture_runs import ROOT, SCENARIOS, Shop, in_parallel, repeated

from support import environment, launch_command

CODES = {"SIGTERM": 143, "SIGINT": 130}
GRACE = 20.0
"""Seconds within which everything must have ended."""


def attempt(shop: Shop, number: int) -> Case:
    """A signal to one rank at a mark, and the command again."""
    dice, scenario = shop.random("signals", number), SCENARIOS["train"]
    name, ranks = ("SIGTERM", "SIGINT")[number % 2], 1 + number // 2 % 2
    phase = ("training", "training", "saving", "scoring", "factorizing")[number // 4 % 5]
    call = dice.randint(1, {"training": 5, "saving": 3}.get(phase, 1))
    rank, delay = dice.randrange(ranks), dice.choice((0.0, dice.uniform(0, 0.1)))
    fault = Fault(name, rank=rank, mark=phase, call=call, delay=delay)
    case = Case(number, f"{name} to rank {rank} of {ranks} at {phase} {call}")

    def work(folder: Path) -> list[str]:
        done = shop.run(scenario, folder, ranks=ranks, fault=fault)
        case.struck, case.grace = done.struck is not None, done.grace
        wrong = _wrong_end(name, done.code, done.errors, folder / "run") if case.struck else []
        return wrong + repeated(shop, scenario, ranks, folder)

    case.attempt(shop.folder / "signals" / str(number), work)
    return case


def _wrong_end(name: str, code: int, errors: str, run: Path) -> list[str]:
    wrong = [] if code == CODES[name] else [f"exit code {code}, not {CODES[name]}"]
    wrong += ["a traceback"] if "Traceback" in errors else []
    said = [line for line in errors.splitlines() if line.startswith("error: ")]
    wrong += [] if len(said) == 1 else [f"{len(said)} lines: {said}"]
    saved = _saved_step(run)
    log = logged_steps(run)[-1] if (run / "metrics.jsonl").is_file() else 0
    return wrong + ([] if log <= saved or "after step" not in errors else [f"step {log} is lost: {saved} is saved"])


def launched(shop: Shop, number: int, name: str, victim: str, *, again: bool) -> Case:
    """A signal to one process of `deepspeed llmdistill/train.py` on two ranks.

    The victim is the command itself, the launcher that it starts, or a rank. `again`: the same signal a second later.
    """
    case = Case(number, f"{name} to {victim} under deepspeed{', twice' if again else ''}")
    long = ["--train.steps=100000", "--train.save_every=null", "--train.log_every=1"]

    def work(folder: Path) -> list[str]:
        command = launch_command(*SCENARIOS["train"].arguments(shop, folder), *long, ranks=2)
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
            return _struck(case, folder, process, name, victim, again=again)
        except subprocess.TimeoutExpired:
            return ["it still runs 60 seconds after the signal"]
        finally:
            with suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children(recursive=True):
                    each.kill()
            process.kill()
            process.wait()

    case.attempt(shop.folder / "signals" / f"launched-{number}", work)
    return case


def _struck(
    case: Case, folder: Path, process: subprocess.Popen[bytes], name: str, victim: str, *, again: bool
) -> list[str]:
    """Send the signal when the training goes on; returns what is wrong after the end."""
    _wait_for_steps(folder / "run", process)
    command = psutil.Process(process.pid)
    launcher = command.children()[0]
    ranks = launcher.children()
    met, number = {"the command": command, "the launcher": launcher, "rank 1": ranks[-1]}[victim], signal.Signals[name]
    began = time.monotonic()
    met.send_signal(number)
    if again:
        time.sleep(1.0)
        if _runs(met):
            met.send_signal(number)
    process.wait(timeout=60)
    # The launcher puts ranks into groups of their own.
    while any(_runs(each) for each in ranks):
        if time.monotonic() - began > 60:
            raise RuntimeError("a rank still runs 60 seconds after the signal")
        time.sleep(0.02)
    case.grace, case.struck = time.monotonic() - began, True
    case.what += f" (exit code {process.returncode})"
    wrong = [f"it took {case.grace:.1f} s"] if case.grace > GRACE else []
    wrong += ["exit code 0"] if process.returncode == 0 else []
    logged, saved = logged_steps(folder / "run")[-1], _saved_step(folder / "run")
    if not again and logged != saved:
        wrong.append(f"step {saved} is saved of {logged}; {(folder / 'err').read_text()[-300:]}")
    return wrong


def _saved_step(run: Path) -> int:
    """The step of the last checkpoint; 0 without any."""
    return max([int(each.name[5:]) for each in run.glob("checkpoints/step-*")], default=0)


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets what it starts in the background ignore them


def _wait_for_steps(run: Path, process: subprocess.Popen[bytes], seconds: float = 240) -> None:
    patience = time.monotonic() + seconds
    while not (run / "metrics.jsonl").is_file() or len(logged_steps(run)) < 3:
        if process.poll() is not None or time.monotonic() > patience:
            raise RuntimeError("the training did not begin")
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
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
    cases: list[Case] = in_parallel(shop, jobs)
    tally, struck = Tally("signals"), [each for each in cases if each.struck]
    tally.add("signals", f"{len(struck)}, of which {sum(not each.wrong for each in struck)} ended as they must")
    longest = max(struck, key=lambda each: each.grace, default=None)
    if longest is not None:
        tally.add("  longest grace", f"{longest.grace:.1f} s ({longest.what})")
    for each in cases:
        if each.number >= 1000:
            tally.add(f"  {each.what}", f"{each.grace:.1f} s")
    tally.add_failures(cases)
    return tally
