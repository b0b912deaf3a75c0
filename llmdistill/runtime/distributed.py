"""The processes of a run: their ranks, and the collective operations that the package uses."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from llmdistill.errors import RankError, UserError
from llmdistill.internals.deepspeed_names import leave_out_shared_memory
from llmdistill.runtime import signals
from llmdistill.runtime.devices import choose_accelerator, default_device
from llmdistill.runtime.extensions import replace_torch_locks
from llmdistill.runtime.launch import (
    DEFAULT_PORT,
    free_port,
    joining,
    launched_ranks,
    launched_ranks_of_node,
    prepare_joining,
)
from llmdistill.runtime.processes import NodeRanks

Value = TypeVar("Value")

COLLECTIVE_TIMEOUT = timedelta(minutes=15)
"""How long a collective operation on tensors may wait for a rank before the run fails. The groups that DeepSpeed
creates have torch's own limits: 10 minutes with NCCL."""
CONTROL_TIMEOUT = timedelta(hours=6)
"""How long ranks wait for the work of a single rank, such as the factorization of a large model."""

_FILE_PATIENCE = 60.0
"""Seconds until a file of rank 0 must be visible on every node."""

_control: Any = None
"""The control group: objects and barriers. It always uses gloo, because waiting for a long time is normal there, and a
rank that dies is noticed immediately."""

_node: NodeRanks | None = None

_joined: World | None = None
"""The world of the process group that `init_distributed` has joined."""
_entered: ContextVar[World | None] = ContextVar("entered", default=None)


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of ranks and the device."""

    rank: int
    size: int
    device: torch.device
    command: str = ""
    """The command or Python call that started the run, for its report."""

    @classmethod
    def alone(cls) -> World:
        """Return the world of a single process, on the first GPU if there is one."""
        return cls(rank=0, size=1, device=default_device())

    @classmethod
    def current(cls) -> World:
        """Return the world of the block of `entered`, or of the process group, or that of a single process."""
        entered = _entered.get()
        if entered is not None:
            return entered
        if not dist.is_initialized():
            return cls.alone()
        if _joined is not None:
            return _joined
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), device=default_device())

    @contextmanager
    def entered(self) -> Iterator[World]:
        """Block in which this is the current world: a rank works alone in it, or on another device."""
        token = _entered.set(self)
        try:
            yield self
        finally:
            _entered.reset(token)

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which prints and writes."""
        return self.rank == 0


def init_distributed(command: str = "") -> World:
    """Join the process group that the launcher describes in the environment; without a launcher, be rank 0 of 1.

    Raises UserError if the ranks do not find each other.
    """
    global _control, _node, _joined
    on_cpu = not torch.cuda.is_available()
    choose_accelerator()
    # Imported here, so that reading a configuration or --help does not wait for DeepSpeed.
    import deepspeed

    replace_torch_locks()
    leave_out_shared_memory()
    # A single process can use any free port, so that several runs can share a machine. The agent of torchrun listens
    # on the port of the environment itself.
    if launched_ranks() == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        os.environ["MASTER_PORT"] = str(free_port())
    # torch joins by these variables alone (env://), also a single process.
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        # The ranks of a node share its cores, but torch would use all cores in each rank.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // launched_ranks_of_node()))
    prepare_joining(None if on_cpu else torch.cuda.device_count())
    with joining(COLLECTIVE_TIMEOUT):
        deepspeed.init_distributed(timeout=COLLECTIVE_TIMEOUT)
    if _control is None and dist.get_world_size() > 1:
        # Objects and barriers go over the CPUs: NCCL would copy them through the GPU, in turn with the step's own
        # collectives.
        _control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
        _node = NodeRanks(_control)
    device = torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not on_cpu:
        torch.cuda.set_device(device)
    _joined = World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, command=command)
    return _joined


def node() -> NodeRanks | None:
    """Return the ranks of this node; None if no process group of several ranks has been joined."""
    return _node


def node_ranks() -> list[int]:
    """Return the ranks of this node."""
    world = World.current()
    nodes = [list(range(world.size))] if _node is None else _node.nodes
    return next(ranks for ranks in nodes if world.rank in ranks)


def node_group(backend: str | None = None) -> Any:
    """Return a process group of the ranks of this node, of several; every rank must call this function.

    `backend` is by default that of the group of all ranks.
    """
    assert _node is not None
    # The first of two: the group of this rank, and those of all nodes.
    return dist.new_subgroups_by_enumeration(_node.nodes, timeout=COLLECTIVE_TIMEOUT, backend=backend)[0]


@contextmanager
def process_group(command: str = "", *, needed: bool = True) -> Iterator[World]:
    """Join the process group as `init_distributed` does, and leave it after the block.

    If no group is needed, there is one only if a launcher has started several ranks.

    After an exception the group is left only if this process is alone in it: NCCL would wait for operations that the
    other ranks never finish. `exit_code` then ends the process.
    """
    if not needed and launched_ranks() == 1:
        yield World.alone()
        return
    world = init_distributed(command)
    if _node is not None:
        signals.end_if_hopeless(_node.report_lost_ranks)
    try:
        yield world
    except BaseException:
        signals.end_if_hopeless(None)  # this rank says why it ends, or all ranks end
        if world.size == 1:
            shut_down()
        raise
    barrier()  # a rank that ends before would be missed by the others
    shut_down()


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_object(value: Any) -> Any:
    """Return the value of rank 0 on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_control)
    return box[0]


def gather_objects(value: Value) -> list[Value]:
    """Return the values of all ranks in order, by way of their CPUs; every rank must call this function."""
    world = World.current()
    gathered = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(gathered, value, group=_control)
    return gathered


def _of_all_ranks(error: Exception) -> Exception:
    """Return what the other ranks raise because of an exception of this one."""
    world = World.current()
    if not isinstance(error, UserError):
        return RankError(f"rank {world.rank} failed with {type(error).__name__}: {error}")
    # Of the same type, which has the exit code.
    shared = type(error)(str(error))
    shared.everywhere = True
    return shared


def on_main(job: Callable[[], Value]) -> Value:
    """Run a job on rank 0 and return its value, which should be small, on every rank; every rank must call it.

    A UserError of the job is raised on every rank; any other exception of it is a RankError on the other ranks.
    """
    world = World.current()
    value, failure, error = None, None, None
    if world.is_main:
        try:
            value = job()
        except Exception as caught:
            if world.size == 1:
                raise
            failure, error = _of_all_ranks(caught), caught
    # Also after a failure: the other ranks wait here, and would wait for a rank that has left.
    value, failure = broadcast_object((value, failure))
    if failure is not None:
        # On rank 0 a UserError is the copy that says `everywhere`; any other exception has its own traceback.
        raise failure if error is None or isinstance(failure, UserError) else error
    return cast(Value, value)


def on_every(job: Callable[[], Value]) -> Value:
    """Run a job on every rank; a UserError of one rank is raised on every rank. Every rank must call this function.

    After the first UserError that the job can raise it must not wait for other ranks. Any other exception ends its rank
    at once, because the other ranks may be waiting for it inside the job.
    """
    world = World.current()
    value, failure = None, None
    try:
        value = job()
    except UserError as error:
        if world.size == 1:
            raise
        failure = _of_all_ranks(error)
    # The first by rank, so that all ranks raise the same one.
    first = next((error for error in gather_objects(failure) if error is not None), None)
    if first is not None:
        raise first
    return cast(Value, value)


def exists_on_main(path: Path) -> bool:
    """Whether a file or folder exists, as rank 0 sees it; the other ranks wait until they see it too.

    No rank decides by its own view, because a shared file system can show a new file later on another node. Every rank
    must call this function. Raises UserError on every rank if a rank still does not see it after a minute.
    """
    world = World.current()
    exists = on_main(path.exists)

    def wait() -> None:
        patience = time.monotonic() + _FILE_PATIENCE
        while exists and not path.exists():
            if time.monotonic() > patience:
                raise UserError(
                    f"{path}: rank 0 has written it, but rank {world.rank} on {socket.gethostname()} does not see it: "
                    "give an output_dir on a file system that all nodes share"
                )
            time.sleep(0.1)

    on_every(wait)
    return exists


def wait_until_visible(path: Path) -> None:
    """Wait until this rank sees a file that rank 0 has written; see `exists_on_main`."""
    exists_on_main(path)


def largest_number(number: int) -> int:
    """Return the largest number of all ranks; every rank must call it."""
    return largest_later(number)()


def sum_at(tensor: Tensor, rank: int) -> None:
    """Sum a tensor over the ranks in place, at one rank; what the other ranks hold afterwards means nothing."""
    world = World.current()
    if world.size > 1:
        dist.reduce(tensor, dst=rank)


def to_main(value: Value | None, source: int) -> Value | None:
    """Return what the rank `source` has on rank 0, and None on the others; rank 0 and the source must call it."""
    world = World.current()
    if source == 0 or world.rank not in (0, source):
        return value if world.is_main else None
    if not world.is_main:
        dist.send_object_list([value], dst=0, group=_control)
        return None
    box: list[Any] = [None]
    dist.recv_object_list(box, src=source, group=_control)
    return cast(Value, box[0])


def largest_later(number: int) -> Callable[[], int]:
    """Begin to look for the largest number of all ranks; the returned function waits for it.

    Every rank must call both. No device is involved, so the host waits for nothing but the other hosts.
    """
    world = World.current()
    # On the CPU, so that a GPU's queue is not waited for.
    largest = torch.tensor(number)
    work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_control, async_op=True) if world.size > 1 else None

    def wait() -> int:
        if work is not None:
            work.wait()
        return int(largest)

    return wait


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group=_control)


def shut_down() -> None:
    """Leave the process group, if there is one."""
    global _control, _node, _joined
    _control = _node = _joined = None
    signals.end_if_hopeless(None)
    if dist.is_initialized():
        dist.destroy_process_group()
