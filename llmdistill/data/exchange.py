"""Messages between ranks beside a training, from another thread than the one that computes its steps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from llmdistill.memo import cached_by

Value = TypeVar("Value")


@dataclass(frozen=True)
class Exchange:
    """The ranks of a process group of its own, or one rank alone; all call the methods, in the same order."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    @cached_by(lambda cls, timeout: (cls, dist.group.WORLD, timeout))
    def of_all_ranks(cls, timeout: timedelta) -> Exchange:
        """Open the exchange among all ranks, which wait so long for each other; every rank must call this function.

        It is opened once for each process group of all ranks: a second one would only cost sockets.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return ALONE
        # Gloo and not NCCL, which copies objects through the GPU: they would compete with the training step, and a run
        # on the CPU has no NCCL.
        group = dist.new_group(backend="gloo", timeout=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def deal(self, parts: list[Value] | None) -> Value:
        """Return this rank's part of what rank 0 gives, one part a rank; the others give None."""
        # Where scatter puts the part; a rank alone has its own there already.
        box: list[Any] = [None] if parts is None else parts[:1]
        if self.size > 1:
            dist.scatter_object_list(box, cast(list[Any], parts), src=0, group=self.group)
        return cast(Value, box[0])

    def collect(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in order, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values


ALONE = Exchange()
