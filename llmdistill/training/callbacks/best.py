"""Keeps the student of the best validation of a run (`train.keep_best`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llmdistill.artifacts import manifest_damage, read_record
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.runtime.distributed import on_main
from llmdistill.runtime.terminal import warn_main
from llmdistill.training.callbacks.base import TrainState

BEST_FILE = "best.json"
"""File in the run's folder: `step`, `metric`, `value` of the best validation so far, and the folder `student`."""
_FOLDER = "best"


@dataclass(frozen=True, kw_only=True)
class BestStudent:
    """The best student so far, which is saved as a model of its own: checkpoints hold the optimizer too and go away.

    The record is written after the model, so that it always names a whole one. A resumed run repeats the validations
    after its checkpoint; an equal value does not replace the student.
    """

    reads: ClassVar[tuple[str, ...]] = ("step", "validation")
    gives: ClassVar[tuple[str, ...]] = ("validation",)

    folder: Path
    """The run folder."""
    metric: str
    """What `value` is, for sentences: loss or the name of a score."""
    save: Callable[[Path], None]
    """Saves the current student in a folder; every rank must call it."""
    score: Callable[[], float] | None = None
    """Scores the current student on the validation set, the more the better; every rank must call it. None: the
    validation loss decides."""

    def check_resumed(self, start: int = 0) -> None:
        """Check the best student of the steps up to `start`, at which a run goes on; at 0 forget it. Rank 0 only.

        Raises UserError if it is damaged, before steps are trained that could only end with the same sentence.
        """
        file = self.folder / BEST_FILE
        if start == 0:  # an attempt that left no checkpoint
            file.unlink(missing_ok=True)
            shutil.rmtree(self.folder / _FOLDER, ignore_errors=True)
            return
        record = read_best(self.folder)
        damage = None if record is None else self._damage(record)
        if damage is not None:
            raise UserError(
                f"{damage}: the best student so far is lost; remove {file}, and the next validation counts as the "
                f"best, or remove {self.folder} to start the run again"
            )
        rows = read_metrics_log(self.folder)
        if record is None and any("valid_loss" in row and 0 < row["step"] <= start for row in rows):
            warn_main(
                f"{file} is missing, so the best student up to step {start} is lost: the next validation counts as the "
                "best"
            )

    def after_step(self, state: TrainState) -> None:
        """See Callback: keep the student if this step's validation is the best so far."""
        if state.validation:
            state.validation |= self.keep_if_best(state.step, state.validation["valid_loss"])

    def keep_if_best(self, step: int, loss: float) -> dict[str, float]:
        """Save the student if its validation is the best so far; return its score, if any. Every rank must call it."""
        score = None if self.score is None else self.score()
        value = loss if score is None else score

        # Rank 0 decides: it alone is sure to have written the record, and all ranks need the same answer.
        def is_better() -> bool:
            best = read_best(self.folder)
            if best is None or not (self.folder / best["student"]).is_dir():
                return True
            return bool(value < best["value"] if score is None else value > best["value"])

        def record() -> None:
            student = {"step": step, "metric": self.metric, "value": value, "student": f"{_FOLDER}/{target.name}"}
            write_json(self.folder / BEST_FILE, student)
            for other in target.parent.iterdir():
                if other != target:
                    shutil.rmtree(other)

        if on_main(is_better):
            target = self.folder / _FOLDER / f"step-{step}"
            # A save that was killed may have left half a student there.
            on_main(lambda: shutil.rmtree(target, ignore_errors=True))
            self.save(target)
            on_main(record)
        return {} if score is None else {"valid_score": score}

    def _damage(self, record: Mapping[str, Any]) -> str | None:
        student = self.folder / record["student"]
        return manifest_damage(student) if student.is_dir() else f"{student} is missing"

    def move_to(self, output: Path) -> dict[str, Any]:
        """Move the best student to `output` and return its record; every rank must call this method."""
        record = on_main(lambda: read_best(self.folder))
        damage = on_main(lambda: None if record is None else self._damage(record))
        if record is None or damage is not None:  # the last step is always validated
            raise UserError(
                f"{damage or f'{self.folder / BEST_FILE} is missing'}: the best student is lost; remove {self.folder} "
                "to start the run again"
            )

        def move() -> None:
            (self.folder / record["student"]).replace(output)
            shutil.rmtree(self.folder / _FOLDER)

        on_main(move)
        return dict(record)


def read_best(folder: Path) -> dict[str, Any] | None:
    """Return the record of the best student of a run; None if no validation decided on it."""
    return read_record(
        folder / BEST_FILE,
        remedy="remove the file, and the next validation counts as the best",
        keys={"step": int, "metric": str, "value": int | float, "student": str},
    )
