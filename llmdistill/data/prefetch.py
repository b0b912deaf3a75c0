"""Prepares the batches of the next step while the device computes the current step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import Batch, Loader


class Prefetched:
    """A loader that prepares the micro batches of the next step in a thread while the caller uses the current ones.

    The batches are the same as without prefetching. An exception in the thread is raised when the caller asks for the
    step. The thread is idle between steps and ends with the loader, or with the process.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        steps: int,
        device: torch.device,
        prepare: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        """Wrap a loader whose batches depend on the step alone; from now on no other code may ask it for batches.

        No batches are prepared beyond `steps`, the steps of the run. `prepare` is applied to each batch, on the CPU.
        For a GPU the batches are kept in pinned memory, from which it copies asynchronously.
        """
        self._loader = loader
        self._steps = steps
        self._device = device
        self._prepare = prepare
        # One thread makes all batches, in the order in which they are requested, because a loader may have a position
        # in a stream.
        self._thread = ThreadPoolExecutor(1, "batches", initializer=_use, initargs=(device,))
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step; if they are not prepared, as when a run begins, they are made now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == step:
            batches = ahead[1].result()
        else:
            if ahead is not None:
                ahead[1].cancel()
            batches = self._thread.submit(self._make, step).result()
        if step + 1 < self._steps:
            self._ahead = step + 1, self._thread.submit(self._make, step + 1)
        return batches

    def _make(self, step: int) -> list[Batch]:
        batches = [self._prepare(batch) for batch in self._loader.micro_batches(step)]
        return [_pinned(batch) for batch in batches] if self._device.type == "cuda" else batches


def _use(device: torch.device) -> None:
    # Otherwise the thread of every rank would pin memory through the first GPU.
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _pinned(batch: Batch) -> Batch:
    def pinned(value: Any) -> Any:
        return value.pin_memory() if isinstance(value, Tensor) else value

    return replace(batch, **{each.name: pinned(getattr(batch, each.name)) for each in fields(batch)})
