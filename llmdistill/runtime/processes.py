"""The processes of the ranks of this node: which of them has ended, and whether one has said why the run ends."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from llmdistill.runtime.signals import has_ended


class NodeRanks:
    """The ranks of this node, of which one says why the run ends; the others only hear that their connection is lost.

    They share a file without a name, which stays when one of their processes ends and goes with the last one.
    DeepSpeed's launcher tells neither which rank has failed nor that one was killed, and torch's `monitored_barrier`
    names only the address of a connection that a killed rank has closed. torch's store ends with rank 0, so it cannot
    tell who was the first to speak.
    """

    def __init__(self, group: Any) -> None:
        """Every rank must call this at the same time; `group` has all ranks, and is not closed before this object."""
        namespace = ""
        with suppress(OSError):  # containers on one host have numbers of processes of their own
            namespace = os.readlink("/proc/self/ns/pid")
        node = f"{socket.gethostname()} {namespace}"
        # Every rank makes a file: which one is the first of its node is only known after the gather.
        own, name = tempfile.mkstemp(prefix="llmdistill-")
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (node, os.getpid(), name), group=group)
        nodes: dict[str, list[int]] = {}
        for rank, (place, _, _) in enumerate(everyone):
            nodes.setdefault(place, []).append(rank)
        self.nodes = list(nodes.values())
        """The ranks of each node."""
        self._processes = {rank: everyone[rank][1] for rank in nodes[node] if rank != dist.get_rank()}
        self._words = os.open(everyone[nodes[node][0]][2], os.O_RDWR | os.O_APPEND)
        # All ranks have opened the file of the first one before its name goes.
        dist.barrier(group=group)
        os.unlink(name)
        os.close(own)

    def claim_report(self) -> bool:
        """Return whether this rank is the one of its node that says why the run ends: the first that calls this."""
        os.write(self._words, b".")  # appends: the position is then behind this byte and all those before it
        return os.lseek(self._words, 0, os.SEEK_CUR) == 1

    def report_lost_ranks(self) -> bool:
        """Return whether another rank of this node has ended, and say so if none has said why the run ends."""
        lost = self.describe_lost_ranks()
        if lost is not None and self.claim_report():
            print(f"error: {lost}", file=sys.stderr, flush=True)
        return lost is not None

    def describe_lost_ranks(self, seconds: float = 0.0) -> str | None:
        """Return which other ranks of this node have ended, at the latest after some seconds; None if none has."""
        patience = time.monotonic() + seconds
        while not (ended := [rank for rank, process in self._processes.items() if has_ended(process)]):
            if time.monotonic() >= patience:
                return None
            time.sleep(0.05)
        ranks = f"rank {ended[0]}" if len(ended) == 1 else f"ranks {', '.join(map(str, ended))}"
        return (
            f"the process of {ranks} of this node has ended: if it has not said why, it was killed (out of the "
            "machine's memory, for instance); the same command goes on from the last checkpoint"
        )
