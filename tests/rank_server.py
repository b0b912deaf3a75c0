"""A process that has imported everything once and forks the ranks of one job after the other.

A rank is a fork of a process that has only imported, so it computes what a fresh process computes, is a process of its
own that can be killed, and starts without the seconds that the imports of torch, transformers and DeepSpeed take.
Tests talk to the server through `support.RankServer`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import runpy
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import noting

# What the libraries import only when it is first needed.
LATE_IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # and with it torch's inductor
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "gpt2", "roberta")),
)
OF_VLLM = "llmdistill.factorize.vllm_"


def import_everything() -> None:
    """Import the whole package and what its libraries import late, and load DeepSpeed's extension."""
    import llmdistill

    for module in pkgutil.walk_packages(llmdistill.__path__, "llmdistill."):
        if not module.name.startswith(OF_VLLM):  # which imports them itself
            importlib.import_module(module.name)
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    importlib.import_module("deepspeed.comm.torch").build_shm_op()


def run_program(program: str, arguments: list[str]) -> int:
    """Do what `python program.py arguments` or `python -m program arguments` does and return its exit code."""
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            sys.modules.pop(program, None)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def be_program(job: dict[str, Any], *more: str) -> NoReturn:
    """Run the job's program and end the process."""
    code = run_program(job["program"], [*more, *job["arguments"]])
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as Python's end does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def be_job(job: dict[str, Any]) -> NoReturn:
    """Lead a process group of its own with the job's folder, environment and files, and run the job in it."""
    os.setsid()
    os.chdir(job["folder"])
    for number, file in enumerate((os.devnull, job["stdout"], job["stderr"])):
        os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(job["environment"])
    if job["ranks"] == 0:
        be_program(job)
    be_launcher(job)


def be_launcher(job: dict[str, Any]) -> NoReturn:
    """Fork the ranks with what DeepSpeed's launcher gives them; as there, the first that fails ends the others.

    DeepSpeed's launcher looks once a second, so the others have up to a second to say something.
    """
    size = str(job["ranks"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=job["port"], WORLD_SIZE=size)
    os.environ.update(LOCAL_SIZE=size, CROSS_RANK="0", CROSS_SIZE="1")
    ranks = set()
    for rank in range(job["ranks"]):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            # A script is told its rank by an argument too; a module runs with --no_local_rank.
            be_program(job, *([f"--local_rank={rank}"] if job["program"].endswith(".py") else []))
        ranks.add(child)
    first = 0
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and first == 0:
            first = code
            time.sleep(1)
            for other in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    os._exit(first % 256)


def main() -> NoReturn:
    """Serve jobs from the connection whose file descriptor is the argument, until its other end is closed."""
    connection = Connection(int(sys.argv[1]))
    import_everything()
    noting.begin()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what DeepSpeed said of its extension would otherwise stand in the output of every fork
    gc.collect()
    gc.freeze()  # the collector would otherwise write to every page of a fork, and so copy it
    with contextlib.suppress(EOFError):
        while True:
            job = connection.recv()
            child = os.fork()
            if child == 0:
                be_job(job)
            connection.send(child)
            _, status = os.waitpid(child, 0)
            connection.send(os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    main()
