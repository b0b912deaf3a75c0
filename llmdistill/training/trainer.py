"""The training loop: a batch, the teacher's targets, the student's losses, the backward pass, the optimizer's step.

It knows no model family, file format or paper.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import POSITIONS, Batch, Loader, Outputs
from llmdistill.config import TrainConfig
from llmdistill.methods import Method
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.engine import learning_rate
from llmdistill.step.forward import TappedModel
from llmdistill.step.loss_modes import LossModes, choose_modes_of_models, set_loss_modes
from llmdistill.step.not_finite import first_not_finite
from llmdistill.step.teacher import Teacher, live_models
from llmdistill.training.callbacks.base import Callback, TrainState, check_order


@dataclass
class Trainer:
    """All objects that the steps of a run need; `run` trains the student."""

    engine: Any
    student: TappedModel
    teacher: Teacher | None
    """None for a method that learns from the labels alone."""
    method: Method
    loader: Loader
    settings: TrainConfig
    seed: int
    teacher_time: Stopwatch = field(init=False)
    """Measures the time of the teacher."""

    def __post_init__(self) -> None:
        """Start with no time, and no batches."""
        self.teacher_time = Stopwatch(World.current().device)
        # `choose_loss_modes` reads the batches of the first step before `run` does, and a loader gives them once.
        self.micro_batches = lru_cache(maxsize=1)(lambda step: self.loader.micro_batches(step))

    def run(self, start: int, callbacks: Sequence[Callback]) -> None:
        """Train from step `start` on. After each step the callbacks look at it in order; their exceptions end it."""
        check_order(callbacks)
        for step in range(start, self.settings.steps):
            # The rate follows from the step alone, so that a checkpoint needs no state of a scheduler.
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, step)
            self._seed(step)
            micro_batches = self.micro_batches(step)
            losses, counts = self.train_step(micro_batches)
            state = TrainState(
                settings=self.settings,
                step=step + 1,
                micro_batches=micro_batches,
                losses=losses,
                counts=counts,
                was_applied=self.engine.was_step_applied(),
            )
            for callback in callbacks:
                callback.after_step(state)

    def train_step(self, micro_batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
        """Do one optimizer step.

        Returns this rank's terms of each micro batch, (micro batches, terms), already divided by the global counts, and
        the global counts in the order of POSITIONS.
        """
        batches = [self.to_device(batch) for batch in micro_batches]
        # Before the forward passes, which compute the gradients of the terms, the divisors included.
        counts = global_counts(batches)
        # A batch without a position of one kind has a sum of 0 there, and 0 / 1 is 0.
        divisors = dict(zip(POSITIONS, counts.clamp(min=1), strict=True))
        # DeepSpeed averages over ranks and accumulation steps; our sums are divided by the global count already.
        undo_average = World.current().size * len(batches)
        values: list[Tensor] = []
        # The value of terms whose labels a batch does not have.
        nothing = torch.zeros((), device=World.current().device)
        for batch in batches:
            with self.teacher_time.measured(), torch.no_grad():
                teacher_outputs = self.compute_targets(batch)
            losses = self.student.compute_losses(batch, self.method.bind_terms(teacher_outputs, batch, divisors))
            self.engine.backward(losses.total * undo_average)
            # DeepSpeed counts the micro batches, and steps the optimizer only at the last one.
            self.engine.step()
            sums = {name: loss.sum / divisors[self.method.positions[name]] for name, loss in losses.terms.items()}
            values.append(torch.stack([sums.get(name, nothing) for name in self.method.weights]))
        return torch.stack(values), counts

    def to_device(self, batch: Batch, method: Method | None = None) -> Batch:
        """Return a batch on the device, with the positions of its labels."""
        # The positions are found on the CPU; on a GPU this would synchronize the host with the device.
        shift = (self.method if method is None else method).shift
        return batch.with_positions(shift=shift).to(World.current().device)

    def compute_targets(self, batch: Batch, method: Method | None = None) -> Outputs | None:
        """Return the teacher's outputs that a method, by default the run's, needs; None if it needs no teacher."""
        method = self.method if method is None else method
        if self.teacher is None or not method.needs_teacher:
            return None
        return self.teacher.compute_targets(batch, lm_head=method.teacher_positions)

    def choose_loss_modes(self, start: int, known: LossModes | None) -> LossModes:
        """Decide how the token losses of the models are computed, if the method has any, before the first forward pass.

        Every rank must call this function. `known` are the modes that the checkpoint of a resumed run stores.
        """
        if known is not None:
            set_loss_modes({**live_models(self.teacher), "student": self.student}, known)
            return known
        if not self.method.token_terms:
            return {}
        self._seed(start)
        (first, *_) = self.micro_batches(start)
        self.engine.eval()
        modes = choose_modes_of_models(self.teacher, self.student, self.to_device(first))
        self.engine.train()
        return modes

    def describe_origin(self, step: int, micro_batches: Sequence[Batch]) -> str:
        """Run the forward passes of a step (from 1) again for `first_not_finite`, and return what it says."""
        models = {name: tapped.model for name, tapped in live_models(self.teacher).items()}
        models["student"] = self.student.model

        def run() -> None:
            self._seed(step - 1)
            with torch.no_grad():
                for batch in micro_batches:
                    moved = self.to_device(batch)
                    self.student.compute_losses(
                        moved, self.method.bind_terms(self.compute_targets(moved), moved, moved.divisors())
                    )

        return first_not_finite(models, run)

    def _seed(self, step: int) -> None:
        """Seed torch by the run's seed, the step and the rank, so that a resumed run draws the same random numbers."""
        # Ranks draw different dropout. The factors keep the seeds of different runs, steps and ranks apart in practice.
        torch.manual_seed((self.seed * 1_000_003 + step) * 65_537 + World.current().rank)


def global_counts(micro_batches: Sequence[Batch]) -> Tensor:
    """Return the count of each of POSITIONS in the global batch; every rank must call this function."""
    counts = [batch.counts() for batch in micro_batches]
    return all_reduce_sum(
        torch.stack([torch.stack([of_batch[name] for of_batch in counts]).sum() for name in POSITIONS])
    )


class Stopwatch:
    """Adds up the time of repeated work; on a GPU it uses events, so that the host does not wait in the block."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time spent in the block."""
        if self._on_gpu:
            # Events lie in the queue of the GPU: the clock of the host would only time the launches.
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def add(self, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self._seconds += seconds

    def pop_seconds(self) -> float:
        """Return the seconds measured since the last call."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000  # milliseconds
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
