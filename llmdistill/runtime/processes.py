"""The processes of the ranks of one node, watched so that a killed one is named."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

_GRACE_SECONDS = 0.2
"""How long after the end of another rank this one may still learn that the run is over, before the end is reported."""


@cache
def _own_marker() -> int:
    """Return the descriptor of a file in memory that has a byte once this process says why it fails; -1 without one.

    Another process of the node can open it, and then read it after the end of this one. The exit code and the name of a
    process that has ended are gone as soon as its launcher has reaped it.
    """
    return os.memfd_create("why-this-rank-fails") if hasattr(os, "memfd_create") else -1


def says_why() -> None:
    """Tell the other ranks of the node that this one fails and says why, so that none of them reports its end."""
    if _own_marker() >= 0:
        os.write(_own_marker(), b"1")


class RankProcess(NamedTuple):
    """The process of a rank."""

    rank: int
    node: str
    """The host and the namespace of the process number, which containers on one host do not share."""
    pid: int
    marker: int = -1
    """The descriptor in that process of the file that says whether it says why it fails; -1 without one."""

    @classmethod
    def own(cls, rank: int) -> RankProcess:
        """Return the process that calls."""
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(rank, f"{socket.gethostname()} {namespace}", os.getpid(), _own_marker())

    def has_ended(self) -> bool:
        """Whether the process is gone or waits to be reaped; only its own node can tell."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return Path("/proc").is_dir()
        return state in "ZX"


def _nodes(processes: Sequence[RankProcess]) -> list[list[int]]:
    """The ranks of each node."""
    nodes: dict[str, list[int]] = {}
    for each in processes:
        nodes.setdefault(each.node, []).append(each.rank)
    return list(nodes.values())


class NodeWatch:
    """Reports the silent end of another rank's process on this node, in the first rank there that still runs.

    A rank that waits for a killed one may notice nothing (NCCL waits until its time is over), and the launcher ends it
    within a second. A thread that sleeps until one of the processes ends reports it at once. Only Linux can watch; on
    other systems nothing is reported.
    """

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        node = RankProcess.own(0).node  # processes of other nodes may have the number of this one
        self._here = [each for each in processes if each.node == node]
        self._markers: dict[int, int] = {}
        for each in self._here:
            if each.marker >= 0:
                with suppress(OSError):  # of another user, or ended already
                    self._markers[each.pid] = os.open(f"/proc/{each.pid}/fd/{each.marker}", os.O_RDONLY)
        self.nodes = _nodes(processes)
        self._over = threading.Event()
        self._reported = threading.Event()

    def begin(self) -> None:
        """Report ends from now on, until `expect_ends`."""
        watched = selectors.DefaultSelector()
        for each in self._here:
            if each.pid != os.getpid() and hasattr(os, "pidfd_open"):
                with suppress(OSError):
                    watched.register(os.pidfd_open(each.pid), selectors.EVENT_READ, each)
        if watched.get_map():
            threading.Thread(target=self._watch, args=(watched,), name="watch of the ranks", daemon=True).start()

    def expect_ends(self) -> None:
        """Report nothing from now on: the ranks of this run end, or say why they fail."""
        self._over.set()

    def has_lost_a_rank(self) -> bool:
        """Whether a rank of this node has ended although the run is not over."""
        return not self._over.is_set() and any(each.has_ended() for each in self._here)

    def reports_an_end(self, seconds: float) -> bool:
        """Whether a rank of this node ends within some seconds, and says why or is reported by this or another rank."""
        if not self.sees_an_end(seconds):
            return False
        return self.was_told_why() or not self._is_first() or self._reported.wait(seconds)

    def was_told_why(self) -> bool:
        """Whether a rank of this node has ended and said why."""
        return any(each.has_ended() and self._says_why(each) for each in self._here)

    def sees_an_end(self, seconds: float) -> bool:
        """Whether a rank of this node ends within some seconds."""
        patience = time.monotonic() + seconds
        while not any(each.has_ended() for each in self._here):
            if time.monotonic() > patience:
                return False
            time.sleep(0.05)
        return True

    def _says_why(self, process: RankProcess) -> bool:
        marker = self._markers.get(process.pid)
        return marker is not None and os.fstat(marker).st_size > 0

    def _is_first(self) -> bool:
        return next((each.pid for each in self._here if not each.has_ended()), None) == os.getpid()

    def _watch(self, watched: selectors.BaseSelector) -> None:
        while watched.get_map():
            for key, _ in watched.select():
                watched.unregister(key.fileobj)
                os.close(key.fd)
                if not self._over.wait(_GRACE_SECONDS) and self._is_first() and not self._says_why(key.data):
                    print(f"error: {_end_of(key.data.rank)}", file=sys.stderr, flush=True)
                    self._reported.set()


def _end_of(rank: int) -> str:
    return (
        f"the process of rank {rank} of this node has ended: if it has not said why, it was killed (out of the "
        "machine's memory, for instance); the same command goes on from the last checkpoint"
    )
