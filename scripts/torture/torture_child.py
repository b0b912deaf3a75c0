"""One process under torture: `torture_child.py FAULT.json PROGRAM ARGUMENTS` arms a fault and runs the program.

The fault strikes in one rank, at a mark (the n-th call of a function that begins a phase, and a while later) or at a
change (just before the n-th time that this rank changes something in the watched folder), so that no folder can be
left in a state that is never tried. FAULT.json has the fields of `Fault`.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import safetensors.torch
from rank_server import run_program
from safetensors import SafetensorError

MARKS = {
    "start": "llmdistill.studies.distillation:claim_folder",
    "factorizing": "llmdistill.training.assemble:measure_weights",
    "calibrating": "llmdistill.students.start.weigh:measure_factors",
    "caching": "llmdistill.teachers.cache.shards:_run_teacher",
    "training": "llmdistill.training.trainer:global_counts",
    "saving": "llmdistill.training.checkpoints:save_file",
    "student": "llmdistill.training.assemble:save_student",
    "scoring": "llmdistill.training.job:load_model",
    "generating": "llmdistill.generation.response_file:append_batch",
    "comparing": "llmdistill.studies.launcher:Launcher._start",
    "exporting": "llmdistill.serving.dense:merge",
}
"""The function whose calls begin each phase, where the phase looks it up."""
_PHASES = (
    (r"/cal/", "calibrating"),
    (r"/checkpoints(/|$)", "saving"),
    (r"/(metrics\.jsonl|tensorboard|best)", "training"),
    (r"/(scores|predictions|metrics\.json|report|ranks)", "scoring"),
    (r"/\.?student(\.|/|$)", "student"),
    (r"/(\.?untrained|weighting|spectra)", "factorizing"),
    (r"/\.?(cache)(/|$)", "caching"),
    (r"/answers", "generating"),
    (r"/\.?dense", "exporting"),
)
_ERRORS = {"full": errno.ENOSPC, "read-only": errno.EROFS, "failing": errno.EIO}
"""What a disk says; SafetensorError has only the text."""


def find_mark(phase: str) -> tuple[Any, str]:
    """Return the module or class that holds the function of a phase, and its name there."""
    where, _, names = MARKS[phase].partition(":")
    *owners, name = names.split(".")
    owner: Any = importlib.import_module(where)
    for each in owners:
        owner = getattr(owner, each)
    return owner, name


@dataclass
class Fault:
    """What strikes, where and when."""

    kind: str = "none"
    """kill, a name of a signal, launcher (SIGKILL for the parent), a key of _ERRORS, none, or server, which its own
    process lets die after `call` answers."""
    rank: int = 0
    mark: str = ""
    call: int = 1
    delay: float = 0.0
    """Seconds after the mark's call."""
    change: int = 0
    """Before this change, from 1; 0 for a fault at a mark."""
    torn: bool = False
    """The change is done by half first."""


class Torture:
    """Arms a fault in this process, whose rank is that of its environment.

    The folder of the fault is RUN.fault, where RUN is the folder whose changes count. When the fault strikes, `struck`
    is written there, and at the end changes-R.json with all changes of rank R.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self._fault, self._changes, self._lock = fault, list[str](), threading.RLock()
        self._folder, self._watched = folder, f"{folder.with_suffix('')}/"
        self.rank = int(os.environ.get("RANK", "0"))
        self._inside = self._broken = False
        sys.addaudithook(self._heard)
        for module, name in ((safetensors.torch, "serialize_file"), (os, "fsync")):
            setattr(module, name, self._asked(getattr(module, name)))
        if self._fault.mark and self._fault.rank == self.rank:
            self._arm_mark()

    def write_changes(self) -> None:
        (self._folder / f"changes-{self.rank}.json").write_text(json.dumps(self._changes))

    def _arm_mark(self) -> None:
        (owner, name), calls = find_mark(self._fault.mark), [0]
        works: Callable[..., Any] = getattr(owner, name)

        def marked(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == self._fault.call and self._fault.delay == 0:
                self._strike(f"mark {self._fault.mark}")
            elif calls[0] == self._fault.call:
                late = threading.Timer(self._fault.delay, self._strike, (f"mark {self._fault.mark}",))
                late.daemon = True
                late.start()
            return works(*given, **named)

        setattr(owner, name, marked)

    def _asked(self, works: Callable[..., Any]) -> Callable[..., Any]:
        """Stands before a function that changes a file and raises no audit event."""

        def asked(*given: Any, **named: Any) -> Any:
            def write_half() -> None:
                works(*given, **named)
                os.truncate(given[1], os.path.getsize(given[1]) // 2)

            if works.__name__ == "fsync":
                self._change("fsync", os.readlink(f"/proc/self/fd/{given[0]}"))
            else:
                self._change("write", str(given[1]), write_half)
            return works(*given, **named)

        return asked

    def _heard(self, event: str, given: tuple[Any, ...]) -> None:
        if self._inside:
            return
        if event == "open" and isinstance(given[0], (str, bytes)):
            path, mode, flags = os.fsdecode(given[0]), given[1], given[2]
            if (mode is not None and set(mode) & set("wax+")) or (mode is None and flags & (os.O_WRONLY | os.O_RDWR)):
                self._change(f"open {mode}", path, lambda: _append_half(path, mode or "w"))
        elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            folder = given[1] if event in ("os.remove", "os.rmdir") and given[1] != -1 else None
            name = os.fsdecode(given[0]) if not isinstance(given[0], int) else os.readlink(f"/proc/self/fd/{given[0]}")
            path = name if folder is None else f"{os.readlink(f'/proc/self/fd/{folder}')}/{name}"
            self._change(event, path)

    def _change(self, event: str, path: str, half: Callable[[], None] | None = None) -> None:
        """Count a change of a watched folder; strike if it is the one."""
        # TensorBoard's thread opens its file a hundred times; a folder that is there is not made.
        if "/tensorboard/" in path or (event == "os.mkdir" and os.path.isdir(path)):
            return
        if not os.path.abspath(path).startswith(self._watched):
            return
        with self._lock:
            self._changes.append(f"{event} {path}")
            due = self._fault.change == len(self._changes) and self._fault.rank == self.rank
            if self._broken or (due and self._fault.kind in _ERRORS):
                self._break(event, path)
            elif due and self._fault.kind != "none":
                self._inside = True
                if self._fault.torn and half is not None:
                    half()
                self._inside = False
                self._strike(f"{event} {path}")

    def _break(self, event: str, path: str) -> None:
        """The disk fails from now on, but lets remove."""
        if not self._broken:
            self._say(f"{event} {path}")
        self._broken = True
        number = _ERRORS[self._fault.kind]
        if event == "write":
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")
        if self._fault.kind == "read-only" or event not in ("os.remove", "os.rmdir"):
            raise OSError(number, os.strerror(number), path)

    def _say(self, what: str) -> None:
        self._inside = True
        (self._folder / "struck").write_text(json.dumps([what, time.time()]))
        self._inside = False

    def _strike(self, what: str) -> None:
        self._say(what)
        kind = self._fault.kind
        if kind == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.Signals[kind])


def phase_of(change: str) -> str:
    """The phase in which a change of a run's folder happens, by its path."""
    return next((phase for pattern, phase in _PHASES if re.search(pattern, change)), "start")


def _append_half(path: str, mode: str) -> None:
    with open(path, "ab" if "a" in mode else "wb") as file:
        file.write(b'{"step": 3, "lo')


def main() -> int:
    """Arm the fault and run the program; a launched program's --local_rank is dropped."""
    fault, program, *arguments = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    file = Path(fault)
    torture = Torture(Fault(**json.loads(file.read_text())), file.parent)
    try:
        return run_program(program, arguments)
    finally:
        torture.write_changes()


if __name__ == "__main__":
    sys.exit(main())
