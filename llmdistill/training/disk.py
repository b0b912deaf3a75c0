"""What a run needs on the disk, and the check of the disk that it will write to."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass

from llmdistill.errors import UserError
from llmdistill.files import byte_size, nearest_folder
from llmdistill.models.forms import trains_form_alone
from llmdistill.training.batches import batch_source
from llmdistill.training.plan import Plan

STATE_BYTES = 12
"""Bytes of the optimizer's state for a trained parameter: its fp32 weight and Adam's two moments."""


@dataclass(frozen=True)
class DiskNeed:
    """The most that a run's folder holds at a time, in bytes, without its log, predictions and plots (a few MB)."""

    checkpoint: int
    """One checkpoint. With LoRA this is 0: it holds the adapters alone."""
    checkpoints: int
    """How many are kept, with the one that is written before the oldest is deleted."""
    student: int
    """A student without its forms."""
    students: int
    """How many untrained students are written: the run's, and a copy that another process reads meanwhile."""
    trained: int
    """A trained student, in the forms in which it is saved."""
    trained_students: int
    """How many are written: the last one, and with train.keep_best the best one and its successor."""

    @classmethod
    def of(cls, plan: Plan) -> DiskNeed:
        """Return the need of a run from its plan."""
        config, params = plan.config, plan.models.sizes["student_params"]
        saves = plan.trains and config.train.save_every is not None
        best = 2 if plan.trains and config.train.keep_best is not None else 0
        made = int(config.student.model is None)
        return cls(
            checkpoint=STATE_BYTES * params if saves and not trains_form_alone(config.student) else 0,
            checkpoints=config.train.keep_checkpoints + 1 if saves else 0,
            student=params * plan.models.dtype.itemsize,
            students=made + int(batch_source(plan).student_copy is not None),
            trained=plan.models.sizes["saved_bytes"],
            trained_students=int(plan.trains) + best,
        )

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        students = self.students * self.student + self.trained_students * self.trained
        return self.checkpoints * self.checkpoint + students

    def __str__(self) -> str:
        """Say it as part of a sentence."""
        students = Counter({self.student: self.students})
        students[self.trained] += self.trained_students
        parts = [
            (self.checkpoints, "checkpoint", self.checkpoint),
            *((number, "student", size) for size, number in students.items()),
        ]
        return " and ".join(
            f"{number} {what}{'s' if number > 1 else ''} of {byte_size(size)}"
            for number, what, size in parts
            if number * size
        )


def check_disk(plan: Plan) -> None:
    """Raise a UserError if the disk has no room for what a run will still write; rank 0 only."""
    if (plan.folder / "student").is_dir():  # only scores and reports are still to be written
        return
    need, there = DiskNeed.of(plan), nearest_folder(plan.folder)
    # An earlier start of the run may have written some of it.
    parts = [plan.folder / name for name in ("checkpoints", "untrained", "student", "best")]
    copy = batch_source(plan).student_copy
    files = (file for part in [*parts, *([] if copy is None else [copy])] for file in part.rglob("*") if file.is_file())
    missing = need.total - sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(
            f"output_dir {plan.folder}: the run needs {byte_size(missing)} more there ({need}), and the disk of "
            f"{there} has {byte_size(free)} free: free some, choose another output_dir, or lower train.keep_checkpoints"
        )
