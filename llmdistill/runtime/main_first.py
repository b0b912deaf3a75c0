"""Work on files that rank 0 does first, and the first rank of each node next, so that the other ranks find it done."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World, node_ranks, on_every, on_main

Value = TypeVar("Value")


def main_first(job: Callable[[], Value]) -> Value:
    """Run a job on every rank: first on rank 0, then on the first rank of each other node, then on all others.

    So a job that keeps what it finds on the disk, such as a download, does its work once on a disk, and the later ranks
    find it there. Every rank must call this function, and the job must not wait for other ranks. A UserError of one
    rank is raised on every rank.
    """
    world = World.current()
    own_round = 0 if world.is_main else 1 if node_ranks()[0] == world.rank else 2
    values: list[Value] = []
    for number in range(3 if world.size > 1 else 1):
        on_every(lambda: values.append(job()) if number == own_round else None)  # noqa: B023  # called at once
    return values[0]


def make_once(make: Callable[[], Path]) -> Path:
    """Have rank 0 make a folder and return it on every rank; a node that does not see it makes its own.

    `make` returns the folder, which exists only when it is finished and whose name depends on its content, and makes it
    if it is not there. Every rank must call this function. Raises UserError on every rank, if `make` raises it on one,
    or another node would make something else.
    """
    world = World.current()
    folder = on_main(make)

    def see() -> None:
        if folder.exists():
            return
        own = make()
        if own != folder:
            raise UserError(
                f"rank {world.rank} on {socket.gethostname()} reads other data than rank 0 ({own.name} and "
                f"{folder.name} in {folder.parent}): give data and a data.cache_dir that all nodes share"
            )

    main_first(see)
    return folder
