"""Objects that the ranks exchange beside the training, from another thread than the one that computes the steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from llmdistill.runtime.distributed import CONTROL_TIMEOUT

Value = TypeVar("Value")

_groups: dict[Any, Any] = {}
"""The group of the exchange for the process group of all ranks: a second one would only cost sockets."""


@dataclass(frozen=True)
class GroupExchange:
    """The ranks of a process group of its own, so that its messages never meet those of the steps."""

    rank: int
    size: int
    group: Any

    def deal(self, parts: list[Value] | None) -> Value:
        """Return this rank's part of what rank 0 gives, one part a rank; the others give None."""
        box: list[Any] = [None]
        dist.scatter_object_list(box, cast(list[Any], parts), src=0, group=self.group)
        return cast(Value, box[0])

    def collect(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in order, on every rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found


def open_exchange() -> GroupExchange | None:
    """Return the exchange among all ranks; None if there is one rank. Every rank must call this function."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    everyone = dist.group.WORLD
    if everyone not in _groups:
        # gloo, because the objects stay on the CPU and a rank that dies is noticed immediately.
        _groups[everyone] = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    return GroupExchange(dist.get_rank(), dist.get_world_size(), _groups[everyone])
