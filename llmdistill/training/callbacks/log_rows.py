"""Adds up what a row of a run's log says of its steps, and logs the row when it is due."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.engine import learning_rate
from llmdistill.training.callbacks.base import TrainState
from llmdistill.training.callbacks.loss_watch import LOWEST, is_diverged
from llmdistill.training.log import RunLog
from llmdistill.training.trainer import Trainer


class LogRows:
    """Logs a row every `train.log_every` steps, after a validation and after the last step."""

    reads: ClassVar[tuple[str, ...]] = (
        "settings",
        "step",
        "micro_batches",
        "counts",
        "was_applied",
        "known_terms",
        "lowest_loss",
        "measures",
        "validation",
        "validation_seconds",
    )
    gives: ClassVar[tuple[str, ...]] = ("is_logged",)

    def __init__(self, log: RunLog, trainer: Trainer) -> None:
        self._log, self._trainer, self._method = log, trainer, trainer.method
        self._began = time.perf_counter()
        self._restart()

    def _restart(self) -> None:
        self._terms = dict.fromkeys(self._method.weights, 0.0)
        # The counts stay on the device until the row is due.
        self._tokens = torch.zeros((), dtype=torch.int64, device=World.current().device)
        self._positions = self._steps = 0
        self._row_began = time.perf_counter()

    def figures(self) -> dict[str, Any]:
        """See Accumulator."""
        teacher_seconds = self._trainer.teacher_time.pop_seconds()
        # Put back: the row itself is not due yet.
        self._trainer.teacher_time.add(teacher_seconds)
        return {
            "terms": self._terms,
            "tokens": int(self._tokens),
            "positions": int(all_reduce_sum(torch.full_like(self._tokens, self._positions))),
            "steps": self._steps,
            "seconds": time.perf_counter() - self._row_began,
            "teacher_seconds": teacher_seconds,
        }

    def restore(self, figures: Mapping[str, Any]) -> None:
        """See Accumulator."""
        self._terms.update(figures["terms"])
        self._tokens.fill_(figures["tokens"])
        self._positions = figures["positions"] if World.current().is_main else 0  # those of all ranks are added up
        self._steps = figures["steps"]
        self._row_began -= figures["seconds"]  # as if this process had begun the row
        self._trainer.teacher_time.add(figures["teacher_seconds"])

    def after_step(self, state: TrainState) -> None:
        """See Callback. Every rank must call it, because the ranks' positions are added up."""
        for known in state.known_terms:
            for name, value in known.values.items():
                self._terms[name] += value
        if state.was_applied:
            self._tokens += state.counts[0]  # POSITIONS begins with the tokens
            self._positions += sum(batch.input_ids.numel() for batch in state.micro_batches)
            self._steps += 1
        is_due = state.is_last or state.is_due(state.settings.log_every) or bool(state.validation)
        if is_due and self._steps > 0:
            # A term is its mean over the steps since the last row.
            terms = {name: value / self._steps for name, value in self._terms.items()}
            loss = sum(self._method.weights[name] * value for name, value in terms.items())
            tokens, positions = int(self._tokens), int(all_reduce_sum(torch.full_like(self._tokens, self._positions)))
            # A validation has a speed of its own.
            seconds = time.perf_counter() - self._row_began - state.validation_seconds
            skipped = self._trainer.engine.skipped_steps
            row = {
                "loss": loss,
                "learning_rate": learning_rate(state.settings, state.step - 1),
                "grad_norm": float(self._trainer.engine.get_global_grad_norm() or 0.0),
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "padding_share": 1 - tokens / positions,
                "teacher_share": self._trainer.teacher_time.pop_seconds() / seconds,
                "peak_memory_bytes": peak_memory(World.current().device),
                **({"skipped_steps": skipped} if skipped else {}),
                **terms,
                **({LOWEST: state.lowest_loss} if is_diverged(loss, state.lowest_loss) else {}),
            }
            # Over all steps of this process, so that validations and checkpoints count too.
            seconds_per_step = (time.perf_counter() - self._began) / (state.step - self._log.start)
            eta = seconds_per_step * (state.settings.steps - state.step)
            self._log.add_row(state.step, row | state.measures | state.validation, eta)
            self._restart()
        elif state.validation:
            self._log.add_figures(state.step, state.validation)
        self._log.activity.advance()
        state.is_logged = True


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on this rank's GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest  # Linux counts in KiB, macOS in bytes
