"""The loop: accumulate, step, log, save. It knows no model family, file format or paper."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import Batch, Outputs
from llmdistill.config import TrainConfig
from llmdistill.data.sampler import TrainLoader
from llmdistill.errors import UserError
from llmdistill.methods import Method
from llmdistill.runtime.checkpoint import save_checkpoint
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.engine import set_learning_rate
from llmdistill.runtime.log import RunLog, Stopwatch
from llmdistill.runtime.schedule import learning_rate


@dataclass
class Trainer:
    """Everything that a training run needs, finished; `run` trains."""

    engine: Any
    student: Callable[[Batch], Outputs]
    teacher: Callable[[Batch], Outputs] | None
    """None for a method that learns from the labels alone."""
    method: Method
    loader: TrainLoader
    settings: TrainConfig
    seed: int
    folder: Path
    world: World

    def run(self, start: int, log: RunLog) -> None:
        """Train from step `start` to the end, saving on the way.

        Raises:
            UserError: the loss is no longer finite.
        """
        clock = Stopwatch(self.world.device)
        since = _Since(self.world.device, list(self.method.weights))
        began = time.perf_counter()
        for step in range(start, self.settings.steps):
            set_learning_rate(self.engine, learning_rate(self.settings, step))
            # All randomness of a step follows from its number, so a resumed run repeats it.
            torch.manual_seed(_mix(self.seed, step, self.world.rank))
            since.add(*self.train_step(self.loader.micro_batches(step), clock))
            done = step + 1
            if done % self.settings.log_every == 0 or done == self.settings.steps:
                elapsed = time.perf_counter() - began
                eta = elapsed / (done - start) * (self.settings.steps - done)
                self._log(log, done, since, clock.take(), eta)
            if done % self.settings.save_every == 0 or done == self.settings.steps:
                save_checkpoint(self.engine, self.folder, done, self.settings.keep_checkpoints, self.world)
            log.advance()

    def train_step(self, micro_batches: list[Batch], clock: Stopwatch) -> tuple[Tensor, Tensor]:
        """One optimizer step.

        Returns this rank's terms, already divided by the global counts, and the global counts (tokens, labels).
        """
        micro_batches = [batch.to(self.world.device) for batch in micro_batches]
        counts = global_counts(micro_batches)
        divisors = {"tokens": counts[0].clamp(min=1), "labels": counts[1].clamp(min=1)}
        # DeepSpeed averages over ranks and accumulation steps; our sums are divided by the global count already.
        undo_average = self.world.size * len(micro_batches)
        totals = torch.zeros(len(self.method.weights), device=self.world.device)
        for batch in micro_batches:
            teacher = None
            if self.teacher is not None:
                with clock.running(), torch.no_grad():
                    teacher = self.teacher(batch)
            student = self.student(batch)
            losses = self.method(student, teacher, batch)
            terms = {name: loss.sum / divisors[self.method.positions[name]] for name, loss in losses.items()}
            total = torch.stack([self.method.weights[name] * term for name, term in terms.items()]).sum()
            if "labels" not in self.method.positions.values():
                # ZeRO-3 gathers parameters on the way back from the model's output, so the loss must hang on it.
                total = total + 0.0 * student.logits.sum()
            self.engine.backward(total * undo_average)
            self.engine.step()
            totals += torch.stack([terms[name].detach() for name in self.method.weights])
        return totals, counts

    def _log(self, log: RunLog, step: int, since: _Since, teacher_seconds: float, eta: float) -> None:
        seconds, tokens, means = since.take()
        terms = dict(zip(self.method.weights, means, strict=True))
        loss = sum(self.method.weights[name] * value for name, value in terms.items())
        if not math.isfinite(loss):
            raise UserError(
                f"the loss is {loss} at step {step}: lower train.learning_rate (now {self.settings.learning_rate}) "
                f"or train.max_grad_norm; checkpoints up to the last save are in {self.folder / 'checkpoints'}"
            )
        values = {
            "loss": loss,
            "learning_rate": learning_rate(self.settings, step - 1),
            "grad_norm": float(self.engine.get_global_grad_norm() or 0.0),
            "tokens_per_second": tokens / seconds,
            "teacher_share": teacher_seconds / seconds,
        }
        log.row(step, values, terms, eta)


def global_counts(micro_batches: list[Batch]) -> Tensor:
    """Real tokens and labelled tokens of the whole global batch, as (2,); every rank must call it."""
    tokens = sum(batch.attention_mask.sum() for batch in micro_batches)
    labels = sum(batch.num_labels() for batch in micro_batches)
    return all_reduce_sum(torch.stack([torch.as_tensor(tokens), torch.as_tensor(labels)]))


class _Since:
    """Terms, tokens and time since the last line of the log; sums stay on the device until then."""

    def __init__(self, device: torch.device, names: list[str]) -> None:
        self._device, self._names = device, names
        self._reset()

    def _reset(self) -> None:
        self._terms = torch.zeros(len(self._names), device=self._device)
        self._tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._steps = 0
        self._began = time.perf_counter()

    def add(self, terms: Tensor, counts: Tensor) -> None:
        self._terms += terms
        self._tokens += counts[0]
        self._steps += 1

    def take(self) -> tuple[float, int, list[float]]:
        """Seconds, global tokens, and each term's mean over the steps; every rank must call it."""
        means = (all_reduce_sum(self._terms) / self._steps).tolist()
        tokens = int(self._tokens)
        seconds = time.perf_counter() - self._began
        self._reset()
        return seconds, tokens, means


def _mix(seed: int, step: int, rank: int) -> int:
    """One seed from three numbers, without collisions in practice."""
    return (seed * 1_000_003 + step) * 65_537 + rank
