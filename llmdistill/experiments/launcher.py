"""Starting the main job and other commands as processes of their own, so that one that fails takes no other along."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Launcher:
    """How the processes of a comparison are started."""

    flags: Sequence[str] = field(default_factory=tuple)
    """For the deepspeed launcher, such as --num_gpus 8."""

    def train_command(self, recipe: Path) -> list[str]:
        """The main job with a recipe."""
        return self.command("llmdistill.train", "--recipe", str(recipe))

    def command(self, module: str, *arguments: str) -> list[str]:
        """A module under the launcher; alone on a CPU without it, which saves a process and seconds a run."""
        if not self.flags and not torch.cuda.is_available():
            return [sys.executable, "-m", module, *arguments]
        beside = Path(sys.executable).with_name("deepspeed")
        launcher = str(beside) if beside.is_file() else "deepspeed"
        return [launcher, *self.flags, "--no_local_rank", "--module", module, *arguments]

    def run(self, command: Sequence[str], log: Path) -> str | None:
        """Run a command with its output in a file; returns None, or in one sentence why it failed."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            try:
                code = process.wait()
            except BaseException:
                # An interrupted comparison leaves no run behind that a resumed one would meet.
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
                raise
        return None if code == 0 else _reason(log, code)


def shown_command(command: Sequence[str]) -> str:
    """A command as a user would type it."""
    names = {sys.executable: "python", str(Path(sys.executable).with_name("deepspeed")): "deepspeed"}
    return shlex.join(names.get(word, word) for word in command)


def _reason(log: Path, code: int) -> str:
    """The run's own sentence, or the last line that says anything."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = errors[-1] if errors else (lines[-1] if lines else "it printed nothing")
    return f"{said} (exit code {code}, log {log})"


def _die_with_parent() -> None:
    """On Linux, let the child end with a comparison that is killed outright."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
