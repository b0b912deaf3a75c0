"""The training loop: accumulate, step, log, save. It does not depend on a model family, file format or paper."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import POSITIONS, Batch, Loader, Outputs
from llmdistill.config import TrainConfig
from llmdistill.errors import Stopped, UserError
from llmdistill.methods import Method
from llmdistill.models.forward import TappedModel
from llmdistill.progress import progress
from llmdistill.run.best import BestStudent
from llmdistill.run.checkpoints import save_checkpoint
from llmdistill.run.finite import FiniteSteps, StepTerms
from llmdistill.run.log import RunLog, Stopwatch
from llmdistill.run.loss_check import LossModes, check_losses, set_loss_modes
from llmdistill.run.loss_watch import LossWatch, uneven_terms
from llmdistill.run.origin import first_not_finite
from llmdistill.run.stopping import Stopping
from llmdistill.run.term_gradients import term_gradients
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.engine import learning_rate
from llmdistill.runtime.terminal import warn_main
from llmdistill.teacher.cached import Teacher

_MEASURED_STEP = 10
"""The step after which the gradients of the terms are compared. A student that starts as its teacher has none at
first."""


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
    loss_modes: LossModes = field(default_factory=dict)
    """How the token losses of the models are computed, from `check_losses`."""
    _first: list[Batch] | None = None
    """The micro batches of the first step, from `check_losses`: a loader may be asked for them only once."""

    def run(self, start: int, log: RunLog) -> None:
        """Train from step `start` to the end and save checkpoints.

        Raises:
            UserError: the loss or the gradient is no longer finite.
            Stopped: a signal has come; the step is finished and saved.
        """
        clock = Stopwatch(self.world.device)
        since = _Since(self.world.device)
        finite, watch = self._finite_steps(), LossWatch(self.method.weights, log.rows)
        stopping = Stopping(self.world)
        began, log_every = time.perf_counter(), self.settings.log_every or self.settings.steps
        for step in range(start, self.settings.steps):
            for group in self.engine.optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, step)
            # The seed depends on the step, so a resumed run draws the same random numbers.
            torch.manual_seed(_mix(self.seed, step, self.world.rank))
            micro_batches = self.loader.micro_batches(step) if self._first is None else self._first
            self._first = None
            losses, counts = self.train_step(micro_batches, clock)
            done = step + 1
            if self.engine.was_step_applied():
                self._note(finite.applied(done, micro_batches, losses), watch, since)
                since.add(counts, sum(batch.input_ids.numel() for batch in micro_batches))
            else:
                self._note(finite.skipped(done, micro_batches, losses), watch, since)
            if done == _MEASURED_STEP:
                self._warn_of_uneven_terms(micro_batches[0])
            validates = len(self.validation) > 0 and self._is_due(done, self.settings.validate_every)
            logs = since.steps > 0 and (validates or self._is_due(done, log_every))
            saves = self.settings.save_every is not None and self._is_due(done, self.settings.save_every)
            is_last = done == self.settings.steps
            if logs or saves or is_last:
                self._note(finite.check_last(), watch, since)  # before the log, the student or a checkpoint is written
            if logs:
                elapsed = time.perf_counter() - began
                eta = elapsed / (done - start) * (self.settings.steps - done)
                row = self._row(done, since, clock.take())
                row |= watch.of_row(row["loss"])
                if validates:
                    row["valid_loss"] = self._validated(done)
                    if self.best is not None:
                        row |= self.best.validated(done, row["valid_loss"])
                    since.restart_clock()
                log.row(done, row, eta)
            stop = stopping.signal_at(last=is_last)
            if stop or saves or is_last:
                self._note(finite.check_last(), watch, since)
                finite.check_student(done)
            if stop or saves:
                keep = self.settings.keep_checkpoints
                save_checkpoint(self.engine, self.folder, done, keep, self.world, loss_modes=self.loss_modes)
            log.advance()
            if stop:
                raise Stopped(stop, f"after step {done}")

    def check_losses(self, start: int, known: LossModes | None) -> None:
        """Decide how the token losses of the models are computed, if the method has any, before the first forward pass.

        Every rank must call this function. `known` are the modes that the checkpoint of a resumed run stores; None
        without a checkpoint.
        """
        models = {"student": self.student}
        if isinstance(self.teacher, TappedModel):
            models = {"teacher": self.teacher, **models}
        if known is not None:
            self.loss_modes = known
            set_loss_modes(models, known)
            return
        if not self.method.token_terms:
            return
        torch.manual_seed(_mix(self.seed, start, self.world.rank))
        self._first = self.loader.micro_batches(start)
        self.engine.eval()
        self.loss_modes = check_losses(models, self._moved(self._first[0], self.method), self.world)
        self.engine.train()

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
            with clock.running(), torch.no_grad():
                taught = self._taught(batch)
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
            for batch in progress(self.validation, "Validation", "batches"):
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

    def _validated(self, step: int) -> float:
        loss = self.validation_loss()
        if not math.isfinite(loss):
            raise UserError(
                f"the validation loss is {loss} at step {step}, and the training loss is finite: look for a sample in "
                "data.valid that the models cannot read; checkpoints up to the last save are in "
                f"{self.folder / 'checkpoints'}"
            )
        return loss

    def _finite_steps(self) -> FiniteSteps:
        return FiniteSteps(
            engine=self.engine,
            world=self.world,
            terms=list(self.method.weights),
            folder=self.folder,
            policy=self.settings.not_finite,
            learning_rate=self.settings.learning_rate,
            origin=self._origin,
        )

    def _origin(self, step: int, micro_batches: Sequence[Batch]) -> str:
        """Run the forward passes of a step once more, and say where the first value that is not finite comes from."""
        models = {"student": self.student.model}
        if isinstance(self.teacher, TappedModel):
            models = {"teacher": self.teacher.model, **models}

        def run() -> None:
            torch.manual_seed(_mix(self.seed, step - 1, self.world.rank))
            with torch.no_grad():
                for batch in micro_batches:
                    moved = self._moved(batch, self.method)
                    self.student.learn(moved, self.method.running(self._taught(moved), moved, moved.divisors()))

        return first_not_finite(models, run)

    def _taught(self, batch: Batch) -> Outputs | None:
        return None if self.teacher is None else self.teacher.teach(batch, lm_head=self.method.taught_positions)

    def _note(self, terms: StepTerms | None, watch: LossWatch, since: _Since) -> None:
        """Hand on the terms of a step that was checked, if there is one, and say what is strange about them."""
        if terms is not None:
            since.add_terms(terms.values)
            for warning in watch.add(terms.step, terms.values):
                warn_main(warning, self.world)

    def _warn_of_uneven_terms(self, batch: Batch) -> None:
        """Warn of terms that hardly move the student, or that alone move it.

        Under ZeRO-3 no rank has whole parameters, so nothing is said.
        """
        # The student's own answers are no labels, so the terms on labels have no gradient in such a batch.
        if self.engine.zero_optimization_stage() == 3 or len(self.method.weights) == 1 or batch.own_answers:
            return
        moved = self._moved(batch, self.method)

        def teach() -> Outputs | None:
            with torch.no_grad():
                return self._taught(moved)

        student = self.student.without_engine()
        found = term_gradients(self.method, self.student.model, student, teach, moved, moved.divisors())
        for name, (share, remedy) in uneven_terms(found).items():
            warn_main(f"term {name} has {share:.1%} of the gradient at step {_MEASURED_STEP}: {remedy}", self.world)

    def _moved(self, batch: Batch, method: Method) -> Batch:
        # The label positions are found on the CPU; on a GPU this would synchronise the host with the device.
        return batch.with_label_rows(shift=method.shift).to(self.world.device)

    def _is_due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.settings.steps

    def _row(self, step: int, since: _Since, teacher_seconds: float) -> dict[str, float]:
        """Return the log row for the steps since the last row: the figures of the run, then each term."""
        seconds, tokens, positions, terms = since.take()
        loss = sum(self.method.weights[name] * value for name, value in terms.items())
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
    """Accumulates terms, tokens and time since the last log row; counts stay on the device until the next row."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._terms: dict[str, float] = {}
        self._tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        self._positions = self.steps = 0
        self._began = time.perf_counter()

    def restart_clock(self) -> None:
        """Restart the clock, so that the time of a validation is not counted."""
        self._began = time.perf_counter()

    def add(self, counts: Tensor, positions: int) -> None:
        """Add one step: the global counts, and the tokens of this rank's batches with padding."""
        self._tokens += counts[0]
        self._positions += positions
        self.steps += 1

    def add_terms(self, terms: Mapping[str, float]) -> None:
        """Add the terms of the global batch of one of these steps, which are known one step later."""
        for name, value in terms.items():
            self._terms[name] = self._terms.get(name, 0.0) + value

    def take(self) -> tuple[float, int, int, dict[str, float]]:
        """Return seconds, global tokens without and with padding, and each term's mean; every rank must call it.

        The terms of all steps must be added.
        """
        means = {name: value / self.steps for name, value in self._terms.items()}
        tokens, positions = int(self._tokens), int(all_reduce_sum(torch.full_like(self._tokens, self._positions)))
        seconds = time.perf_counter() - self._began
        self._reset()
        return seconds, tokens, positions, means


def _mix(seed: int, step: int, rank: int) -> int:
    """Combine three numbers into one seed; collisions do not occur in practice."""
    return (seed * 1_000_003 + step) * 65_537 + rank
