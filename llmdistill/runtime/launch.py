"""Ranks: what a launcher (DeepSpeed's, torchrun, srun of Slurm) says to them, and our own launcher on one machine."""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

from llmdistill.errors import Stopped, UserError
from llmdistill.messages import logger
from llmdistill.progress import hand_over
from llmdistill.runtime import signals

_NOTICE_SECONDS = 30.0
"""How long ranks wait for the others before they say so."""
DEFAULT_PORT = 29500
"""The port of DeepSpeed's launcher, unless it is given another one."""
LAUNCHER_FLAGS = (
    *("num_gpus", "num_nodes", "hostfile", "include", "exclude"),
    *("master_addr", "master_port", "node_rank", "log_level"),
)
"""Flags of DeepSpeed's launcher that our commands take too; each flag takes a value."""
LAUNCHER_SWITCHES = ("no_ssh",)
"""Those that take no value."""
_HOSTFILE = Path("/job/hostfile")
"""DeepSpeed's launcher reads it unless it is given another one."""
_KILL_SECONDS = 30.0
"""How long the other ranks may still run after one has failed. After a signal they have no limit: DeepSpeed's launcher
kills ranks 30 seconds after one, in the middle of a long step or a checkpoint."""
_POLL_SECONDS = 0.1
_ELSEWHERE = "203.0.113.1"
"""An address of no network of ours (RFC 5737): its route is the default one. Nothing is sent to it."""


def split_launcher_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the launcher's flags with their values and the arguments of the run.

    Raises UserError if --num_gpus is no number of ranks.
    """
    launcher: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and name in LAUNCHER_FLAGS:
            value = value if equals else next(words, "")
            launcher += [word] if equals else [word, value]
            if name == "num_gpus" and (not value.isdecimal() or int(value) == 0):
                raise UserError(f"--num_gpus {value}: give the number of ranks, 1 or more, also on a CPU")
        elif word.startswith("--") and name in LAUNCHER_SWITCHES:
            launcher.append(word)
        else:
            rest.append(word)
    return launcher, rest


def local_ranks(flags: Sequence[str]) -> int | None:
    """Return how many ranks the launcher's flags ask for, which our own launcher can start on this machine.

    That is the number of GPUs by default, and one on a CPU. None: they name nodes or single GPUs, or there is a
    hostfile of DeepSpeed's launcher.
    """
    words = [part for flag in flags for part in flag.split("=", 1)]
    given = dict(zip(words[::2], words[1::2], strict=False))
    if not given.keys() <= {"--num_gpus", "--log_level", "--master_port"} or _HOSTFILE.exists():
        return None
    if "--num_gpus" in given:
        return int(given["--num_gpus"])
    if not has_gpu_device():
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def run_ranks(command: Sequence[str], count: int) -> None:
    """Run a command as the ranks of this machine, and end this process as they end, after the last one has.

    A signal to this process goes on to the ranks: SIGHUP as it is, because they must not write to a terminal that is
    closed, and the others as SIGTERM, because a terminal has sent SIGINT to the ranks too.
    If a rank fails, the others get SIGTERM, and 30 seconds later SIGKILL.

    `start_processes` of `torch.distributed.elastic.multiprocessing` would kill, after a signal too, the ranks that
    still save their checkpoint 30 seconds after the first has ended. Its ranks have sessions of their own, which a
    terminal's Ctrl-Z does not stop, and it loads torch here: 1.2 seconds and 190 MB more.

    Raises:
        SystemExit: always, with the first exit code that is not 0.
        Stopped: a signal has ended ranks that could not say so yet.
    """
    hand_over()
    caught: list[int] = []
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(count))
    ranks: list[subprocess.Popen[bytes]] = []
    ignore_interrupts = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with signals.waiting():
        before = signals.set_handlers(lambda number, _: caught.append(number))
        try:
            for number in map(str, range(count)):
                environment = {**os.environ, **shared, "RANK": number, "LOCAL_RANK": number}
                # A rank that is not ready for Ctrl-C would print a traceback; it gets the launcher's SIGTERM instead.
                ranks.append(subprocess.Popen(command, env=environment, preexec_fn=ignore_interrupts))
            code, told, kill_at = 0, 0, math.inf
            # Polled, because to wait for one rank would be not to see another one fail.
            while running := [rank for rank in ranks if rank.poll() is None]:
                code = code or _first_code(ranks)
                fails = code != 0 and kill_at == math.inf
                if fails:
                    kill_at = time.monotonic() + _KILL_SECONDS
                for rank in running if fails or len(caught) > told else ():
                    rank.send_signal(signal.SIGHUP if signal.SIGHUP in caught else signal.SIGTERM)
                for rank in running if time.monotonic() > kill_at else ():
                    rank.kill()
                told = len(caught)
                time.sleep(_POLL_SECONDS)
        finally:
            for signal_number, handler in before.items():
                signal.signal(signal_number, handler)
    code = code or _first_code(ranks)
    if code < 0 and caught:
        if ranks[0].returncode > 0:
            raise SystemExit(128 + caught[0])  # rank 0 was ready for the signal, and has said so
        raise Stopped(caught[0])
    raise SystemExit(code if code >= 0 else 128 - code)  # as a shell says that a signal has ended a process


def _first_code(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    return next((rank.returncode for rank in ranks if rank.returncode), 0)


def launched_ranks() -> int:
    """Return the number of ranks that the launcher of this process has started; 1 without a launcher.

    In a task of srun this sets the variables of a rank first, which all other launchers set themselves.
    """
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(rank_of_task(os.environ))
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_ranks_of_node() -> int:
    """Return how many of the ranks run on this node; launchers that do not say it use one node."""
    names = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "WORLD_SIZE")  # of torchrun, of DeepSpeed, of both
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), 1)


def rank_of_task(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank for one of several tasks of srun, and nothing for any other process.

    torch reads these variables only, and DeepSpeed asks mpi4py where they are missing, which few clusters have.
    Only the variables of a step count. Those of the job (SLURM_NTASKS) exist in a batch script too, which is no task.
    Rank 0 runs on the first node of the step. MASTER_ADDR and MASTER_PORT are kept if the user has set them.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "SLURM_PROCID" not in environment:
        return {}
    # Slurm writes `2(x3),1` for two tasks on each of three nodes, and one on the fourth.
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"])
    tasks_of_nodes = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    here = str(tasks_of_nodes[int(environment["SLURM_NODEID"])])
    # The first name of a list such as `gpu[01-04,07],login1`.
    nodes = environment["SLURM_STEP_NODELIST"]
    first = re.match(r"(?:\[[^]]*\]|[^,[])+", nodes)
    assert first is not None, f"{nodes!r} is no list of nodes"
    first_node = re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0])
    # Steps that run at the same time, of one job or of several jobs that share a node, need ports of their own; Linux
    # gives the ports from 32768 on to outgoing connections.
    number = int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": here,
        "LOCAL_SIZE": here,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_node,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(15_000 + number % 10_000),
    }


def free_port() -> int:
    """Return a port of this machine that no process uses; torch's function for it would load torch in the launcher."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def has_gpu_device() -> bool:
    """Return whether the system has a device file of a GPU (NVIDIA's, AMD's or that of WSL); loads no library."""
    return any(Path("/dev").glob("nvidia*")) or any(Path("/dev", name).exists() for name in ("kfd", "dxg"))


def is_busy(port: int) -> bool:
    """Return whether a process of this machine listens on a port."""
    with socket.socket() as listener:
        # As torch's own server does: connections that have ended do not keep a port busy.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def prepare_joining(gpus: int | None) -> None:
    """Check what the launcher has said, and choose the network interface on which ranks of several nodes talk.

    Without this torch waits the whole timeout for an address that has no meaning, and gloo may take the loopback.
    `gpus` is the number of GPUs that this process sees; None if the run uses the CPU. Raises UserError if the address
    of rank 0 has no meaning on this node, or this rank has no GPU.
    """
    rank, local_rank, master = (os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"))
    if gpus is not None and int(local_rank) >= gpus:
        raise UserError(
            f"LOCAL_RANK is {local_rank}, but rank {rank} on {socket.gethostname()} sees {gpus} GPU(s): start as many "
            "ranks on each node as it has GPUs, and show all of them to each (Slurm: --gpus-per-node, not "
            "--gpus-per-task)"
        )
    try:
        socket.getaddrinfo(master, None)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR is {master!r}, which rank {rank} on {socket.gethostname()} does not know as a node: give an "
            "address of rank 0's node that all nodes know (deepspeed and torchrun: --master_addr; Slurm: export "
            "MASTER_ADDR)"
        ) from error
    if launched_ranks() > launched_ranks_of_node():
        # gloo would take the interface of the node's own name, which is the loopback on many systems (127.0.1.1).
        # It shall take the one through which this node reaches rank 0, and on rank 0's node that of the address itself.
        import psutil

        own: list[str] = []
        for other in (master, _ELSEWHERE):
            family, kind, protocol, _, address = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
            # A datagram socket sends nothing here: the system only looks up the route, if there is one.
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.connect(address)
                own.append(str(probe.getsockname()[0]))
        # A zone such as the %eth0 of fe80::1%eth0 is no part of the address.
        outside = next(
            (address for address in own if not ipaddress.ip_address(address.split("%")[0]).is_loopback), None
        )
        for interface, addresses in psutil.net_if_addrs().items():
            if any(entry.address.split("%")[0] == outside for entry in addresses):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                break


@contextmanager
def joining(timeout: timedelta) -> Iterator[None]:
    """Join the process group in this block: the first rank of a node says after half a minute that others are missing.

    torch waits in silence until the timeout, and its error names neither the rank nor a remedy.
    Raises UserError if another process listens on the port of rank 0, if ranks are still missing after the timeout, or
    if the ranks cannot connect to each other.
    """
    ranks = launched_ranks()
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    here = f"rank {os.environ['RANK']} on {socket.gethostname()}"
    remedy = (
        f"start the same command on every node, with {ranks} ranks in all, and open the ports between the nodes "
        "(GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network to use)"
    )
    notice = threading.Timer(
        _NOTICE_SECONDS,
        lambda: logger.warning("%s", f"waiting: {here} has not found all {ranks} ranks at {where} yet: {remedy}"),
    )
    notice.daemon = True
    if ranks > 1 and os.environ["LOCAL_RANK"] == "0":
        notice.start()
    try:
        yield
    except RuntimeError as error:
        from torch.distributed import DistError

        # gloo has no exception of its own for ranks that cannot connect, only this name in the message.
        if not isinstance(error, DistError) and "connectFullMesh" not in str(error):
            raise
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"MASTER_PORT is {os.environ['MASTER_PORT']}, on which another process of {socket.gethostname()} "
                "listens, such as another run: give the launcher a free one (deepspeed --master_port N), or start the "
                "run by llmdistill train, which takes one itself"
            ) from error
        minutes = timeout.total_seconds() / 60
        raise UserError(
            f"{here} could not join {ranks} ranks at {where} within {minutes:.0f} minutes "
            f"({str(error).splitlines()[0]}): {remedy}"
        ) from error
    finally:
        notice.cancel()
