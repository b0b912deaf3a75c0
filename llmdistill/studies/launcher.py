"""Runs the trials of a study: each trial in its own process, or one after the other in this process.

A failed trial does not stop the other trials, and an interrupted study leaves no process running.
"""

from __future__ import annotations

import gc
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.launch import free_port
from llmdistill.runtime.signals import end_with_parent
from llmdistill.studies.trials import Progress, Result, Trial, ended_result, finished_result

_POLL_SECONDS = 0.05
_STOP_SECONDS = 60.0
"""How long the trials of a stopped study may take to finish and save their step."""
_PLACES = ("--include", "--exclude", "--hostfile", "--num_nodes", "--master_port")
"""Flags of the deepspeed launcher that place a run; they conflict with trials_at_once, which assigns the GPUs."""


@dataclass(frozen=True)
class InProcess:
    """Runs trials one after the other in this process or process group, which saves the start-up time of each trial."""

    train: Callable[[Any], object]
    """Does the whole work of a trial, from its configuration; every rank calls it."""

    def run(self, trials: Sequence[Trial], progress: Progress | None = None) -> list[Result]:
        """Run the trials that are not finished and return the results of all trials in order; every rank must call it.

        A UserError, and on a single rank any other exception, makes only its trial fail.
        """
        shown = Progress() if progress is None or not World.current().is_main else progress
        return [self._run(trial, shown) for trial in trials]

    def _run(self, trial: Trial, progress: Progress) -> Result:
        earlier = on_main(lambda: finished_result(trial))
        if earlier is not None:
            return progress.end(earlier, earlier=True)
        progress.start(trial)
        began, reason = time.perf_counter(), None
        try:
            self.train(trial.config)
        except UserError as error:
            reason = str(error)
        except Exception as error:
            if World.current().size > 1:  # the other ranks may be at any other point of the run
                raise
            write_text(trial.log, traceback.format_exc())
            reason = f"{type(error).__name__}: {error} (log {trial.log})"
        gc.collect()  # an engine has reference cycles, and dozens of engines would not fit into memory
        return progress.end(on_main(lambda: ended_result(trial, reason, time.perf_counter() - began)))


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    trial: Trial
    slot: Sequence[str]
    began: float


@dataclass(frozen=True)
class Launcher:
    """Runs each trial as a training run in its own process; trials_at_once trials run at the same time."""

    flags: Sequence[str] = ()
    trials_at_once: int = 1
    """Number of trials that run at the same time; they share the machine's GPUs, or its CPU cores without a GPU."""

    def command(self, module: str, *arguments: str, flags: Sequence[str] | None = None) -> list[str]:
        """Return the command that runs a module; on a CPU without flags the launcher would cost seconds for nothing."""
        flags = self.flags if flags is None else flags
        if not flags and not torch.cuda.is_available():
            return [sys.executable, "-m", module, *arguments]
        # That of this environment, which need not be on the path.
        beside = Path(sys.executable).with_name("deepspeed")
        launcher = str(beside) if beside.is_file() else "deepspeed"
        return [launcher, *flags, "--no_local_rank", "--module", module, *arguments]

    def command_of(self, trial: Trial, flags: Sequence[str] | None = None) -> list[str]:
        """Return the command that runs a trial."""
        return [sys.executable, "-m", *trial.entry] if trial.has_launchers else self.command(*trial.entry, flags=flags)

    @property
    def undivided(self) -> Launcher:
        """The launcher that gives the whole machine to each trial."""
        return replace(self, trials_at_once=1)

    def check(self) -> None:
        """Raises UserError if the machine cannot run trials_at_once trials at the same time."""
        self._slots()

    def run(self, trials: Sequence[Trial], progress: Progress | None = None) -> list[Result]:
        """Run the trials that are not finished and return the results of all trials in order."""
        # Trials are taken from the end of the list.
        slots, waiting, shown = self._slots(), list(trials)[::-1], progress or Progress()
        running: list[_Running] = []
        results: dict[Path, Result] = {}
        processes: list[subprocess.Popen[bytes]] = []
        with _ended(processes):
            while waiting or running:
                while waiting and slots:
                    trial = waiting.pop()
                    earlier = finished_result(trial)
                    if earlier is not None:
                        results[trial.folder] = shown.end(earlier, earlier=True)
                        continue
                    shown.start(trial)
                    running.append(self._start(trial, slots.pop(0)))
                    processes.append(running[-1].process)
                time.sleep(_POLL_SECONDS)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    slots.append(run.slot)
                    code = run.process.returncode
                    error = None if code == 0 else _reason(run.trial.log, code)
                    seconds = time.perf_counter() - run.began
                    results[run.trial.folder] = shown.end(ended_result(run.trial, error, seconds))
        return [results[trial.folder] for trial in trials]

    def _start(self, trial: Trial, slot: Sequence[str]) -> _Running:
        """Start a trial in its own process group, with its output in a file."""
        # Launchers that run at the same time must not use the same port.
        # Without flags there is no launcher on a CPU, see `command`.
        port = ("--master_port", str(free_port())) if self.trials_at_once > 1 and slot else ()
        trial.write()
        command = self.command_of(trial, flags=[*slot, *port])
        more: dict[str, str] = {}
        # Trials at the same time share the CPU cores of a machine without GPUs.
        if self.trials_at_once > 1 and not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
            processes = self.trials_at_once * (self._num_gpus() or 1)
            more = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}

        began = time.perf_counter()
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        with trial.log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **more},
                # A group of its own: Ctrl-C reaches the study alone, which then ends launcher and ranks together.
                start_new_session=True,
                preexec_fn=end_with_parent,  # when the study itself is killed
            )
        return _Running(process, trial, slot, began)

    def _slots(self) -> list[Sequence[str]]:
        """Return the launcher's flags for each of the trials that run at the same time."""
        count = self.trials_at_once
        if count == 1:
            return [self.flags]
        placed = next((flag for flag in self.flags if flag.split("=")[0] in _PLACES), None)
        if placed is not None:
            raise UserError(f"--trials_at_once {count}: {placed} puts all trials into one place; leave one of them out")
        if not torch.cuda.is_available():
            return [self.flags] * count
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        gpus = visible.split(",")[: self._num_gpus()]
        share = len(gpus) // count
        if share == 0:
            raise UserError(f"--trials_at_once {count}: there are {len(gpus)} GPU(s) to share out; give at most that")
        groups = [gpus[number * share : (number + 1) * share] for number in range(count)]
        return [("--include", f"localhost:{','.join(group)}") for group in groups]

    def _num_gpus(self) -> int | None:
        words = " ".join(self.flags).replace("=", " ").split()
        return int(words[words.index("--num_gpus") + 1]) if "--num_gpus" in words else None


Runner = InProcess | Launcher


@contextmanager
def _ended(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End all running processes when the block is interrupted, so that they do not disturb a resumed study."""
    try:
        yield
    except BaseException:
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            os.killpg(process.pid, signal.SIGTERM)
        patience = time.monotonic() + _STOP_SECONDS
        for process in alive:
            # The launcher of a trial ends at once, and its ranks after the step that they are doing.
            with suppress(ProcessLookupError):  # nothing of its group is left
                while time.monotonic() < patience:
                    process.poll()  # otherwise its group would live on in it
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def shown_command(command: Sequence[str]) -> str:
    names = {sys.executable: "python", str(Path(sys.executable).with_name("deepspeed")): "deepspeed"}
    return shlex.join(names.get(word, word) for word in command)


def _reason(log: Path, code: int) -> str:
    """Return the error message in a run's log, or the last non-empty line if there is no error message."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    # Commands print a UserError after this word.
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = errors[-1] if errors else (lines[-1] if lines else "it printed nothing")
    return f"{said} (exit code {code}, log {log})"
