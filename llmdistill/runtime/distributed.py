"""The processes of a run: who am I, and the few collective operations that the rest needs."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llmdistill.errors import UserError

Value = TypeVar("Value")


@dataclass(frozen=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device
    command: str = ""
    """What was typed or called to start the run, for its report."""

    @classmethod
    def alone(cls) -> World:
        """A process without peers, on the CPU."""
        return cls(rank=0, size=1, device=torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0


def init_distributed(command: str = "") -> World:
    """Join the process group that the launcher describes in the environment; alone, without one, as rank 0 of 1.

    Args:
        command: what was typed or called, for the reports of what is run.

    Raises:
        UserError: DeepSpeed would have to compile its extension and there is no C++ compiler.
    """
    on_cpu = not torch.cuda.is_available()
    if on_cpu and not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "c++", "g++")):
        raise UserError(
            "no C++ compiler was found, and DeepSpeed compiles an extension at its first start: "
            "install one (Debian and Ubuntu: apt-get install g++)"
        )
    # Imported here: reading a configuration or a --help must not wait for DeepSpeed.
    import deepspeed

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if "WORLD_SIZE" not in os.environ:
        # Alone, no other process has to know the port: any free one lets several runs share a machine.
        os.environ["MASTER_PORT"] = str(_free_port())
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29500")
    if on_cpu and "OMP_NUM_THREADS" not in os.environ:
        # The ranks of a node share its cores; torch gives all of them to each.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))
    # Ranks wait for one another while rank 0 factorises or writes, which takes a large model longer than half an hour.
    deepspeed.init_distributed(timeout=timedelta(hours=6))
    barrier()
    _forget_shared_memory()
    device = torch.device("cpu" if on_cpu else f"cuda:{local_rank}")
    if not on_cpu:
        torch.cuda.set_device(device)
    return World(rank=dist.get_rank(), size=dist.get_world_size(), device=device, command=command)


def _forget_shared_memory() -> None:
    """Take the name off the memory that DeepSpeed's all-reduce on CPUs shares between the ranks of a node.

    DeepSpeed never does: each process would leave 66 MB in /dev/shm, which is memory lost until the machine starts
    again. Once every rank has mapped it the name serves nobody, so from here on even a kill leaves nothing behind.
    """
    owner, where = os.getuid(), f"{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}"
    name = f"deepspeed_allreduce_buffer_{owner}_{where}_{dist.get_rank()}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_object(value: Any) -> Any:
    """What rank 0 holds, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_main(job: Callable[[], Value], world: World) -> Value:
    """What rank 0's job gives, on every rank; the others wait for it, and a UserError in it is raised on all.

    Every rank must call it. The value travels, so it should be small.
    """
    value, mistake = None, None
    if world.is_main:
        try:
            value = job()
        except UserError as error:
            mistake = str(error)
    value, mistake = broadcast_object((value, mistake))
    if mistake is not None:
        raise UserError(mistake)
    return value


def barrier() -> None:
    """Wait for all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def shut_down() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
