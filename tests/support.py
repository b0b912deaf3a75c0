"""What several tests share: starting the main job and other scripts, and reading what they left."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import pytest
    import torch
    from transformers import PreTrainedModel

    from llmdistill.batch import Batch
    from llmdistill.data.sampler import TrainLoader
    from llmdistill.students.start.weigh import CalibrationParts

ROOT = Path(__file__).resolve().parents[1]
MAIN_JOB = "llmdistill/train.py"
FAULTY_RUN = str(ROOT / "tests" / "faulty_run.py")
PATIENCE = 300
"""Seconds that a job may take."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    # One thread a rank: sums are then taken in the same order in every run.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # A run in the tests' own process leaves it with a rank; what is started here is no rank of it.
    mine = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    return {**mine, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def saved_steps(run: Path) -> list[int]:
    """The steps whose checkpoints a run has, in order."""
    return sorted(int(each.name.removeprefix("step-")) for each in (run / "checkpoints").glob("step-*"))


def interrupted_copy(run: Path, folder: Path) -> Path:
    """Copy a finished run as a kill just before its last checkpoint leaves it; returns the copy."""
    shutil.copytree(run, folder)
    steps = saved_steps(folder)
    assert len(steps) > 1
    for name in ("student", "scores", "predictions", f"checkpoints/step-{steps[-1]}"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in ("metrics.json", "report.md"):
        (folder / name).unlink(missing_ok=True)
    return folder


class RankServer:
    """Runs scripts and modules on gloo ranks, forked from one process that has imported everything (rank_server.py).

    Each rank is a process of its own and starts as a fresh one does. One job at a time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection, other = Pipe()
        with (folder / "server.log").open("w") as log:
            server = Path(__file__).with_name("rank_server.py")
            self._process = subprocess.Popen(
                [sys.executable, str(server), str(other.fileno())],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[other.fileno()],
            )
        other.close()
        self._jobs = 0

    def start(self, arguments: Sequence[str], *, ranks: int = 1, program: str = MAIN_JOB, folder: Path = ROOT) -> Job:
        """Start a script, or a module, as the launcher does, or for 0 ranks without it.

        The job must have ended before the next one starts.
        """
        self._jobs += 1
        output, errors = (self._folder / f"{self._jobs}.{name}" for name in ("out", "err"))
        job = {"program": program, "arguments": list(arguments), "ranks": ranks, "folder": str(folder)}
        files = {"stdout": str(output), "stderr": str(errors)}
        self.port = str(free_port())
        self._connection.send({**job, **files, "environment": environment(), "port": self.port})
        return Job(self, [program, *arguments], self.receive(), output, errors)

    def run(
        self, arguments: Sequence[str], *, ranks: int = 1, program: str = MAIN_JOB, folder: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Run a script, or a module, to its end in a folder; AssertionError if it does not end."""
        return self.start(arguments, ranks=ranks, program=program, folder=folder).wait()

    def receive(self, seconds: float = PATIENCE) -> int:
        """The server's next answer; AssertionError with what it wrote if none comes in time."""
        try:
            assert self._connection.poll(seconds), f"no answer within {seconds} seconds"
            return self._connection.recv()
        except EOFError:
            raise AssertionError((self._folder / "server.log").read_text()) from None

    def is_over(self) -> bool:
        """Whether the job's exit code is there to be received."""
        return self._connection.poll()

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        self._process.wait()


class Job:
    """A program that a RankServer runs."""

    def __init__(self, server: RankServer, command: list[str], group: int, output: Path, errors: Path) -> None:
        self._server, self._command, self.group, self.output, self.errors = server, command, group, output, errors

    def is_over(self) -> bool:
        """Whether it has ended by itself."""
        return self._server.is_over()

    def wait(self, seconds: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        """Wait for its end; AssertionError if it does not come in time."""
        try:
            code = self._server.receive(seconds)
        except AssertionError as error:
            for each in psutil.process_iter():
                with suppress(ProcessLookupError):
                    if os.getpgid(each.pid) == self.group:
                        each.send_signal(signal.SIGUSR1)  # it writes where its threads stand, into the others' file
                        time.sleep(1)
            self.kill()
            raise AssertionError("\n".join((str(error), " ".join(self._command), *self._texts()))) from None
        return subprocess.CompletedProcess(self._command, code, *self._texts())

    def kill_when(self, ready: Callable[[], Any]) -> None:
        """SIGKILL for all its ranks as soon as it is ready for it; AssertionError if it never is."""
        patience = time.monotonic() + PATIENCE
        while not ready() and not self.is_over() and time.monotonic() < patience:
            time.sleep(0.005)
        self.kill()
        assert ready(), "\n".join(self._texts())

    def kill(self) -> None:
        """SIGKILL for all its ranks."""
        self._signal(signal.SIGKILL)
        self._server.receive()

    def _texts(self) -> list[str]:
        return [file.read_text() if file.is_file() else "" for file in (self.output, self.errors)]

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file  # with torch, which the process that only hands out tests need not load

    return load_file(folder / "student" / "model.safetensors")


def log_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's log."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged(folder: Path, name: str) -> list[Any]:
    """The values under a name in the rows of a run's log that have it."""
    return [row[name] for row in log_rows(folder) if name in row]


def largest_difference(one: Path, other: Path, without: str = "nothing") -> float:
    """Of all weights of two runs' students, but those whose names match a pattern as a whole."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    compared = [name for name in first if not re.fullmatch(without, name)]
    return max(float((first[name] - second[name]).abs().max()) for name in compared)


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as lines of JSON into a folder, which is made; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def train_loader(
    items: Sequence[Any],
    *,
    collate: Callable[..., Any] | None = None,
    pad_token_id: int = 0,
    **share: int,
) -> TrainLoader:
    """A loader of examples in memory, by default of prompts with responses."""
    from llmdistill.data import collate as module
    from llmdistill.data.sampler import Share, TrainLoader

    make = partial(collate or module.collate, pad_token_id=pad_token_id)
    return TrainLoader(items, Share(**share), make)


def check_steps(made: Callable[[int], Any]) -> list[Any]:
    """Check that what a loader makes depends on the step alone, and draws no random number; returns the first steps."""
    import random

    import numpy as np
    import torch

    expected = [made(step) for step in range(8)]
    for step in (5, 5, 0, 7, 2, 3):
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        state = torch.random.get_rng_state()
        assert made(step) == expected[step]
        assert torch.equal(torch.random.get_rng_state(), state)
    return expected


def in_memory(model: PreTrainedModel, batches: Sequence[Batch], held_out: Sequence[Batch] = ()) -> CalibrationParts:
    """The teacher and the data of a calibration in this process."""
    from llmdistill.students.start.weigh import CalibrationParts
    from llmdistill.teachers.live import LoadedTeacher

    teacher = LoadedTeacher(model, model)
    return CalibrationParts(config=model.config, teacher=lambda: teacher, batches=lambda: (batches, held_out))


def shapes_of_results(job: Callable[[], Any]) -> list[tuple[Any, tuple[int, ...]]]:
    """Each tensor that an operation of torch returned while a job ran: the operation and the shape."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    found: list[tuple[Any, tuple[int, ...]]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            tensors = (each for each in tree_iter(result) if isinstance(each, Tensor))
            found.extend((function.overloadpacket, tuple(each.shape)) for each in tensors)
            return result

    with Watch():
        job()
    return found


class ThreadRanks:
    """Ranks that are threads of this process. It is an exchange, and stands for the control group's operations."""

    own = threading.local()
    """The number of the rank that asks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[bytes] = [b""] * size
        self._meeting = threading.Barrier(size, timeout=120)

    @property
    def rank(self) -> int:
        return int(self.own.rank)

    def collect(self, value: Any) -> list[Any]:
        """The values of all ranks, in order."""
        self._values[self.rank] = pickle.dumps(value)
        self._meeting.wait()
        values = [pickle.loads(each) for each in self._values]
        self._meeting.wait()
        return values

    def deal(self, parts: list[Any] | None) -> Any:
        """This rank's part of what rank 0 gives."""
        assert (parts is None) == (self.rank > 0)
        return self.collect(parts)[0][self.rank]

    def replace_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on the helpers of the package exchange objects among these threads."""
        from llmdistill.runtime import distributed

        monkeypatch.setattr(distributed, "broadcast_object", lambda value: self.collect(value)[0])
        monkeypatch.setattr(distributed, "gather_objects", lambda value: self.collect(value))

    def run(self, job: Callable[[int], Any]) -> list[Any]:
        """The results of a job on every rank, which gets its number."""

        def one(rank: int) -> Any:
            import torch

            from llmdistill.runtime.distributed import World

            self.own.rank = rank
            with World(rank=rank, size=self.size, device=torch.device("cpu")).entered():
                return job(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))
