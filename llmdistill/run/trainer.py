"""The training loop: accumulate, step, log, save. It does not depend on a model family, file format or paper."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import POSITIONS, Batch, Loader
from llmdistill.config import TrainConfig
from llmdistill.errors import Stopped, UserError
from llmdistill.methods import Method
from llmdistill.models.forward import TappedModel
from llmdistill.run.best import BestStudent
from llmdistill.run.checkpoints import save_checkpoint
from llmdistill.run.log import RunLog, Stopwatch
from llmdistill.run.skipped import SkippedSteps
from llmdistill.run.stopping import Stopping
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.engine import learning_rate
from llmdistill.teacher.cached import Teacher


@dataclass
class Trainer:
    """All objects that a training run needs; `run` trains the student."""

    engine: Any
    student: TappedModel
    teacher: Teacher | None
    """None for a method that learns from the labels alone."""
    method: Method
    loader: Loader
    settings: TrainConfig
    seed: int
    folder: Path
    world: World
    validation: Sequence[Batch] = ()
    """This rank's share of the validation set: the same number of batches on every rank, empty without a set."""
    validation_method: Method | None = None
    """The method whose weighted loss on the validation set is logged; None means `method`."""
    best: BestStudent | None = None
    """Keeps the student of the best validation; None keeps the last student."""

    def run(self, start: int, log: RunLog) -> None:
        """Train from step `start` to the end and save checkpoints.

        Raises:
            UserError: the loss is no longer finite.
            Stopped: a signal has come; the step is finished and saved.
        """
        clock = Stopwatch(self.world.device)
        since = _Since(self.world.device, list(self.method.weights))
        skipped = SkippedSteps(self.engine, self.world, list(self.method.weights))
        stopping = Stopping(self.world)
        began, log_every = time.perf_counter(), self.settings.log_every or self.settings.steps
        for step in range(start, self.settings.steps):
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, step)
            # The seed depends on the step, so a resumed run draws the same random numbers.
            torch.manual_seed(_mix(self.seed, step, self.world.rank))
            micro_batches = self.loader.micro_batches(step)
            losses, counts = self.train_step(micro_batches, clock)
            done = step + 1
            if skipped.was_applied(done, micro_batches, losses):
                since.add(losses.sum(0), counts, sum(batch.input_ids.numel() for batch in micro_batches))
            validates = len(self.validation) > 0 and self._is_due(done, self.settings.validate_every)
            if since.steps > 0 and (validates or self._is_due(done, log_every)):
                elapsed = time.perf_counter() - began
                eta = elapsed / (done - start) * (self.settings.steps - done)
                row = self._row(done, since, clock.take())
                if validates:
                    row["valid_loss"] = self.validation_loss()
                    if self.best is not None:
                        row |= self.best.validated(done, row["valid_loss"])
                    since.restart_clock()
                log.row(done, row, eta)
            stop = stopping.signal_at(last=done == self.settings.steps)
            if stop or (self.settings.save_every is not None and self._is_due(done, self.settings.save_every)):
                save_checkpoint(self.engine, self.folder, done, self.settings.keep_checkpoints, self.world)
            log.advance()
            if stop:
                log.close()
                raise Stopped(stop, f"after step {done}")

    def train_step(self, micro_batches: list[Batch], clock: Stopwatch) -> tuple[Tensor, Tensor]:
        """Do one optimizer step.

        Returns this rank's terms of each micro batch, (micro batches, terms), already divided by the global counts, and
        the global counts in the order of POSITIONS.
        """
        micro_batches = [self._moved(batch, self.method) for batch in micro_batches]
        counts = global_counts(micro_batches)
        divisors = dict(zip(POSITIONS, counts.clamp(min=1), strict=True))
        # DeepSpeed averages over ranks and accumulation steps; our sums are divided by the global count already.
        undo_average = self.world.size * len(micro_batches)
        values: list[Tensor] = []
        nothing = torch.zeros((), device=self.world.device)  # the value of terms whose labels a batch does not have
        for batch in micro_batches:
            taught = None
            if self.teacher is not None:
                with clock.running(), torch.no_grad():
                    taught = self.teacher.teach(batch, lm_head=self.method.taught_positions)
            losses = self.student.learn(batch, self.method.running(taught, batch, divisors))
            self.engine.backward(losses.total * undo_average)
            self.engine.step()
            sums = {name: loss.sum / divisors[self.method.positions[name]] for name, loss in losses.terms.items()}
            values.append(torch.stack([sums.get(name, nothing) for name in self.method.weights]))
        return torch.stack(values), counts

    def validation_loss(self) -> float:
        """Return the weighted loss on the validation set, each term averaged over its positions; all ranks call it."""
        method = self.method if self.validation_method is None else self.validation_method
        self.engine.eval()
        sums = torch.zeros(2, len(method.weights), dtype=torch.float64, device=self.world.device)
        with torch.no_grad():
            for batch in self.validation:
                moved = self._moved(batch, method)
                teacher = None
                if method.needs_teacher and self.teacher is not None:
                    teacher = self.teacher.teach(moved, lm_head=method.taught_positions)
                terms = self.student.learn(moved, method.running(teacher, moved)).terms
                pairs = [(terms[name].sum.double(), terms[name].count.double()) for name in method.weights]
                sums += torch.stack([torch.stack(pair) for pair in pairs], dim=1)
        self.engine.train()
        all_reduce_sum(sums)
        means = (sums[0] / sums[1]).tolist()
        return sum(weight * mean for weight, mean in zip(method.weights.values(), means, strict=True))

    def _moved(self, batch: Batch, method: Method) -> Batch:
        # The label positions are found on the CPU; on a GPU this would synchronise the host with the device.
        return batch.with_label_rows(shift=method.shift).to(self.world.device)

    def _is_due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.settings.steps

    def _row(self, step: int, since: _Since, teacher_seconds: float) -> dict[str, float]:
        """Return the log row for the steps since the last row: the figures of the run, then each term."""
        seconds, tokens, positions, means = since.take()
        terms = dict(zip(self.method.weights, means, strict=True))
        loss = sum(self.method.weights[name] * value for name, value in terms.items())
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower train.learning_rate (now {self.settings.learning_rate}) "
                f"or train.max_grad_norm; checkpoints up to the last save are in {self.folder / 'checkpoints'}"
            )
        return {
            "loss": loss,
            "learning_rate": learning_rate(self.settings, step - 1),
            "grad_norm": float(self.engine.get_global_grad_norm() or 0.0),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / positions,
            "teacher_share": teacher_seconds / seconds,
            "peak_memory_bytes": peak_memory(self.world.device),
            **({"skipped_steps": self.engine.skipped_steps} if self.engine.skipped_steps else {}),
            **terms,
        }


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on this rank's GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def global_counts(micro_batches: list[Batch]) -> Tensor:
    """Return the count of each of POSITIONS in the global batch; every rank must call this function."""
    counts = [batch.counts() for batch in micro_batches]
    return all_reduce_sum(torch.stack([torch.stack([each[name] for each in counts]).sum() for name in POSITIONS]))


class _Since:
    """Accumulates terms, tokens and time since the last log row; the sums stay on the device until the next row."""

    def __init__(self, device: torch.device, names: list[str]) -> None:
        self._device, self._names = device, names
        self._reset()

    def _reset(self) -> None:
        self._terms = torch.zeros(len(self._names), device=self._device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._positions = self.steps = 0
        self._began = time.perf_counter()

    def restart_clock(self) -> None:
        """Restart the clock, so that the time of a validation is not counted."""
        self._began = time.perf_counter()

    def add(self, terms: Tensor, counts: Tensor, positions: int) -> None:
        """Add one step: this rank's terms, the global counts, and the tokens of this rank's batches with padding."""
        self._terms += terms
        self._tokens += counts[0]
        self._positions += positions
        self.steps += 1

    def take(self) -> tuple[float, int, int, list[float]]:
        """Return seconds, global tokens without and with padding, and each term's mean; every rank must call it."""
        means = (all_reduce_sum(self._terms) / self.steps).tolist()
        tokens, positions = int(self._tokens), int(all_reduce_sum(torch.full_like(self._tokens, self._positions)))
        seconds = time.perf_counter() - self._began
        self._reset()
        return seconds, tokens, positions, means


def _mix(seed: int, step: int, rank: int) -> int:
    """Combine three numbers into one seed; collisions do not occur in practice."""
    return (seed * 1_000_003 + step) * 65_537 + rank
