"""The training log of a run: lines on the terminal, rows in metrics.jsonl, figures for the monitors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError
from llmdistill.files import write_error, write_text
from llmdistill.messages import say
from llmdistill.progress import Activity, duration
from llmdistill.report.metrics_log import METRICS_LOG, read_metrics_log, row_of
from llmdistill.runtime import signals
from llmdistill.runtime.distributed import World


class RunLog:
    """The log of one training run; only rank 0 writes."""

    monitor: Any = None
    """Gets the rows too, see `training.trackers.monitors`; None writes the file alone."""

    def __init__(self, folder: Path, *, start: int, steps: int) -> None:
        """Open the log after `start` of `steps` steps; rows of later steps, from a killed process, are removed."""
        world = World.current()
        self._active = world.is_main
        self._file = folder / METRICS_LOG
        self.start, self._steps = start, steps
        self._has_header = False
        self.activity = Activity(
            *("Training", steps, "steps"),
            done=start,
            detail=lambda: "stops after this step and saves it" if signals.first_signal() else "",
        )
        self.rows: list[dict[str, float]] = []
        """The rows of earlier starts of the run; empty on the ranks that do not write."""
        if self._active and self._file.is_file():
            content = self._file.read_bytes()
            # A kill can leave the last row unfinished; a damaged row before it is an error.
            whole = content[: content.rfind(b"\n") + 1] if start > 0 else b""
            rows = whole.splitlines(keepends=True)
            earlier = [row for n, row in enumerate(rows, start=1) if row_of(row, f"{self._file}:{n}")["step"] <= start]
            write_text(self._file, b"".join(earlier).decode("utf-8"))
        if self._active:
            self.rows = read_metrics_log(folder)

    def add_row(self, step: int, values: dict[str, float], eta: float) -> None:
        """Log one row, of the available FIGURES and each term; what a reader waits for is printed, in 80 columns."""
        if not self._active:
            return
        cells = {
            "step": f"{step}/{self._steps}",
            "loss": f"{values['loss']:.4g}",
            "tokens/s": f"{values['tokens_per_second']:,.0f}",
            "time left": duration(eta),
        }
        if not self._has_header:
            self._has_header = True
            say("".join(f"{name:>14}" for name in cells))
        say("".join(f"{cell:>14}" for cell in cells.values()))
        self.add_figures(step, values)

    def add_figures(self, step: int, values: dict[str, float]) -> None:
        """Log figures under a step, and print those of a validation; step 0 is the student before the first step.

        Raises UserError if the log cannot be written.
        """
        if not self._active:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            raise write_error(self._file, error) from error
        if self.monitor is not None:
            self.monitor.add(step, values)
        if "valid_loss" in values:
            score = f", score {values['valid_score']:.2f}" if "valid_score" in values else ""
            when = f"at step {step}" if step > 0 else "before the first step"
            say(f"validation loss {values['valid_loss']:.4f}{score} {when}")


def check_log(folder: Path, step: int, entry: Mapping[str, Any] | None) -> None:
    """Raise a UserError if a run's log is shorter than it was when the checkpoint of a step was saved.

    `entry` has its size at that time. A log that the user has removed is no damage.
    """
    file = folder / METRICS_LOG
    if entry is not None and file.is_file() and file.stat().st_size < entry["bytes"]:
        raise UserError(
            f"{file}: it lacks rows up to step {step}, which it had; put the file back as it was, or remove it to go "
            "on without these rows"
        )
