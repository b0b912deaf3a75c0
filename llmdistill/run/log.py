"""The training log of a run: lines on the terminal, rows in metrics.jsonl, figures for the monitors."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.messages import say
from llmdistill.progress import Activity
from llmdistill.report.metrics_log import FIGURES, METRICS_LOG, read_metrics_log, row_of
from llmdistill.run.callbacks.base import TrainState
from llmdistill.run.callbacks.loss_watch import LOWEST, is_diverged
from llmdistill.run.trainer import Trainer
from llmdistill.runtime import signals
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.runtime.engine import learning_rate


class RunLog:
    """The log of one training run; only rank 0 writes."""

    monitor: Any = None
    """Gets the rows too, see `run.trackers.monitors`; None writes the file alone."""

    def __init__(self, folder: Path, *, start: int, steps: int, world: World) -> None:
        """Open the log after `start` of `steps` steps; rows of later steps, from a killed process, are removed."""
        self._active = world.is_main
        self._file = folder / METRICS_LOG
        self.start, self._steps = start, steps
        self._header: list[str] = []
        self.activity = Activity("Training", steps, "steps", done=start, detail=_stops)
        self.rows: list[dict[str, float]] = []
        """The rows of earlier starts of the run; empty on the ranks that do not write."""
        if self._active:
            self._drop_rows_after(start)
            self.rows = read_metrics_log(folder)

    def _drop_rows_after(self, step: int) -> None:
        """Raises UserError if a row is damaged that is not the last, which a kill can leave unfinished."""
        if self._file.is_file():
            content = self._file.read_bytes()
            whole = content[: content.rfind(b"\n") + 1] if step > 0 else b""
            rows = whole.splitlines(keepends=True)
            kept = [row for n, row in enumerate(rows, start=1) if row_of(row, f"{self._file}:{n}")["step"] <= step]
            write_text(self._file, b"".join(kept).decode("utf-8"))

    def row(self, step: int, values: dict[str, float], eta: float) -> None:
        """Log one row: the loss, tokens_per_second, the shares and the other available FIGURES, then each term."""
        if not self._active:
            return
        cells = {
            "step": f"{step}/{self._steps}",
            "loss": f"{values['loss']:.4g}",
            **{name: f"{value:.3g}" for name, value in values.items() if name not in FIGURES},
            "tok/s": f"{values['tokens_per_second']:,.0f}",
            "padding": f"{values['padding_share']:.0%}",
            "teacher": f"{values['teacher_share']:.0%}",
            "eta": tqdm.format_interval(eta),
        }
        if list(cells) != self._header:
            self._header = list(cells)
            say("".join(f" {name:>8}" for name in cells))
        say("".join(f" {cell:>{max(8, len(name))}}" for name, cell in cells.items()))
        self.validated(step, values)

    def validated(self, step: int, values: dict[str, float]) -> None:
        """Log figures under a step, and print those of a validation; step 0 is the student before the first step."""
        if not self._active:
            return
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.monitor is not None:
            self.monitor.add(step, values)
        if "valid_loss" in values:
            score = f", score {values['valid_score']:.2f}" if "valid_score" in values else ""
            when = f"at step {step}" if step > 0 else "before the first step"
            say(f"validation loss {values['valid_loss']:.4f}{score} {when}")


class LogRows:
    """Logs a row every `train.log_every` steps, after a validation and after the last step."""

    def __init__(self, log: RunLog, trainer: Trainer) -> None:
        self._log, self._trainer, self._method = log, trainer, trainer.method
        self._began = time.perf_counter()
        self._restart()

    def _restart(self) -> None:
        self._terms = dict.fromkeys(self._method.weights, 0.0)
        # The counts stay on the device until the row is due.
        self._tokens = torch.zeros((), dtype=torch.int64, device=self._trainer.world.device)
        self._positions = self._steps = 0
        self._row_began = time.perf_counter()

    def after_step(self, state: TrainState) -> None:
        """See Callback. Every rank must call it, because the ranks' positions are added up."""
        for terms in state.known_terms:
            for name, value in terms.values.items():
                self._terms[name] += value
        if state.was_applied:
            self._tokens += state.counts[0]
            self._positions += sum(batch.input_ids.numel() for batch in state.micro_batches)
            self._steps += 1
        is_due = state.is_last or state.is_due(state.settings.log_every) or bool(state.validation)
        if is_due and self._steps > 0:
            seconds = (time.perf_counter() - self._began) / (state.step - self._log.start)
            eta = seconds * (state.settings.steps - state.step)
            self._log.row(state.step, self._row(state) | state.measures | state.validation, eta)
            self._restart()
        elif state.validation:
            self._log.validated(state.step, state.validation)
        self._log.activity.advance()

    def _row(self, state: TrainState) -> dict[str, float]:
        """The figures of the steps since the last row, then each term: its mean over these steps."""
        terms = {name: value / self._steps for name, value in self._terms.items()}
        loss = sum(self._method.weights[name] * value for name, value in terms.items())
        tokens, positions = int(self._tokens), int(all_reduce_sum(torch.full_like(self._tokens, self._positions)))
        seconds = time.perf_counter() - self._row_began - state.validation_seconds
        skipped = self._trainer.engine.skipped_steps
        return {
            "loss": loss,
            "learning_rate": learning_rate(state.settings, state.step - 1),
            "grad_norm": float(self._trainer.engine.get_global_grad_norm() or 0.0),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "padding_share": 1 - tokens / positions,
            "teacher_share": self._trainer.teaching.take() / seconds,
            "peak_memory_bytes": peak_memory(self._trainer.world.device),
            **({"skipped_steps": skipped} if skipped else {}),
            **terms,
            **({LOWEST: state.lowest_loss} if is_diverged(loss, state.lowest_loss) else {}),
        }


def _stops() -> str:
    return "stops after this step and saves it" if signals.caught() else ""


def check_log(folder: Path, step: int, entry: Mapping[str, Any] | None) -> None:
    """Raise a UserError unless a run's log begins with the rows that it had when the checkpoint of a step was saved.

    `entry` has size and sha256 of the log at that time. A log that the user has removed is no damage.
    """
    file = folder / METRICS_LOG
    if entry is None or not file.is_file():
        return
    with file.open("rb") as log:
        rows = log.read(entry["bytes"])
    if hashlib.sha256(rows).hexdigest() != entry["sha256"]:
        raise UserError(
            f"{file}: its rows up to step {step} changed after they were written; put the file back as it was, or "
            "remove it to go on without these rows"
        )


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated on this rank's GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
