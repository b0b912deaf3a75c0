"""A process that has imported everything once and forks the ranks of one job after the other.

A rank is a fork of a process that has only imported, so it computes what a fresh process computes, is a process of its
own that can be killed, and starts without the seconds that the imports of torch, transformers and DeepSpeed take. The
same holds for the commands that a program without ranks starts, such as the trials of a comparison.
Tests talk to the server through `support.RankServer`.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

# What the libraries import only when it is first needed.
LATE_IMPORTS = (
    "deepspeed.runtime.zero.muon.muon_optimizer",  # and with it torch's inductor
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "bert", "gpt2", "roberta")),
)
OF_VLLM = ("llmdistill.serving.vllm_plugin", "llmdistill.generation.vllm_worker")


def import_everything() -> None:
    """Import the whole package and what its libraries import late.

    Also make the tables that every process makes once, and of nothing else: the parser of the settings, and the
    weights that transformers renames when it loads a model.
    """
    import llmdistill

    for module in pkgutil.walk_packages(llmdistill.__path__, "llmdistill."):
        if not module.name.startswith(OF_VLLM):  # which imports them itself
            importlib.import_module(module.name)
    for name in LATE_IMPORTS:
        importlib.import_module(name)
    methods = importlib.import_module("llmdistill.methods").METHODS
    importlib.import_module("llmdistill.config.command_line").run_parser(methods)
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    # Plots stay empty: to draw them is a third of the work of a small run, and tests/unit/report looks at them.
    importlib.import_module("matplotlib.figure").Figure.draw = lambda figure, renderer: None


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
        fork_own_commands()
        be_program(job)
    be_launcher(job)


def fork_own_commands() -> None:
    """From now on a `python -m module` that this process starts is a child of it without the seconds of the imports.

    It is forked from a process that stays as this one is now: what this process does until then is not in the child.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        serve_commands(theirs, parent)
    theirs.close()
    adopt_orphans()

    class ForkedCommand(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: Any, **options: Any) -> None:
            self._options = options
            super().__init__(command, **options)

        def _execute_child(self, command: Any, *given: Any) -> None:
            if isinstance(command, str) or [*command[:2]] != [sys.executable, "-m"]:
                return super()._execute_child(command, *given)  # type: ignore[misc]
            pipes = given[9:15]
            environment = self._options.get("env")
            asked = {
                "program": command[2],
                "arguments": [os.fspath(word) for word in command[3:]],
                "folder": self._options.get("cwd") or os.getcwd(),
                "environment": dict(os.environ if environment is None else environment),
                "session": self._options.get("start_new_session"),
                "before": self._options.get("preexec_fn"),
            }
            files = [number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
            socket.send_fds(ours, [pickle.dumps(asked)], files)
            self.pid, self._child_created = int(ours.recv(32)), True
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    subprocess.Popen = ForkedCommand  # type: ignore[misc]


def adopt_orphans() -> None:
    """From now on an orphan among the grandchildren of this process becomes its child."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def serve_commands(asked: socket.socket, parent: int) -> NoReturn:
    """Fork the commands that the parent asks for, until it ends."""
    os.setsid()  # a signal to the parent's group is not for this process
    while True:
        message, files, *_ = socket.recv_fds(asked, 1 << 18, 3)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            if os.fork() > 0:
                os._exit(0)  # which leaves the command to the parent
            while os.getppid() != parent:
                time.sleep(0.001)
            be_command(asked, pickle.loads(message), files)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def be_command(asked: socket.socket, command: dict[str, Any], files: list[int]) -> NoReturn:
    """Take over the files, the folder and the environment that the command was given, and run it."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    if command["session"]:
        os.setsid()
    if command["before"] is not None:
        command["before"]()
    asked.send(str(os.getpid()).encode())
    asked.close()
    fork_own_commands()
    be_program(command)


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
            patience = time.monotonic() + 1
            while ranks and time.monotonic() < patience:
                ranks.discard(os.waitpid(-1, os.WNOHANG)[0])
                time.sleep(0.01)
            for other in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    os._exit(first % 256)


def main() -> NoReturn:
    """Serve jobs from the connection whose file descriptor is the argument, until its other end is closed."""
    connection = Connection(int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR1)  # for a job that does not end, see support.Job.wait
    gc.disable()  # until everything is imported
    import_everything()
    adopt_orphans()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what DeepSpeed said of its extension would otherwise stand in the output of every fork
    gc.collect()
    gc.freeze()  # the collector would otherwise write to every page of a fork, and so copy it
    gc.enable()
    with contextlib.suppress(EOFError):
        while True:
            job = connection.recv()
            child = os.fork()
            if child == 0:
                be_job(job)
            connection.send(child)
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(ChildProcessError):
                while True:  # ranks whose launcher was killed hold their run's folder until they have ended too
                    os.waitpid(-child, 0)
            connection.send(os.waitstatus_to_exitcode(status))
    os._exit(0)


if __name__ == "__main__":
    main()
