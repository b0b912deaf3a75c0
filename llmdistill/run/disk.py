"""What a run will write on the disk, before it starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from llmdistill.errors import UserError
from llmdistill.files import byte_size, nearest
from llmdistill.run.plan import Plan

_STATE_BYTES = 12
"""Bytes of a trained parameter in a checkpoint: its fp32 weight and Adam's two moments."""


@dataclass(frozen=True)
class DiskNeed:
    """The most that a run's folder holds at a time, in bytes, without its log, predictions and plots (a few MB)."""

    checkpoint: int
    """One checkpoint. With LoRA this is 0: it holds the adapters alone."""
    checkpoints: int
    """The number of them, with the one that is written before the oldest is deleted."""
    student: int
    """One student."""
    students: int
    """The number of them: untrained, trained, and with train.keep_best the best one and its successor."""

    @classmethod
    def of(cls, plan: Plan) -> DiskNeed:
        """Return the need of a run from its plan."""
        config, params = plan.config, plan.models.sizes["student_params"]
        saves = plan.trains and config.train.save_every is not None
        best = 2 if plan.trains and config.train.keep_best is not None else 0
        made = int(config.student.model is None)
        return cls(
            checkpoint=_STATE_BYTES * params if saves and config.student.lora.rank is None else 0,
            checkpoints=config.train.keep_checkpoints + 1 if saves else 0,
            student=params * plan.models.dtype.itemsize,
            students=made + int(plan.trains) + best,
        )

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.checkpoints * self.checkpoint + self.students * self.student

    def __str__(self) -> str:
        """Say it as part of a sentence."""
        parts = [(self.checkpoints, "checkpoint", self.checkpoint), (self.students, "student", self.student)]
        return " and ".join(
            f"{number} {what}{'s' if number > 1 else ''} of {byte_size(size)}"
            for number, what, size in parts
            if number * size
        )


def check_disk(plan: Plan) -> None:
    """Raise a UserError if the disk has no room for what a run will still write; rank 0 only."""
    if (plan.folder / "student").is_dir():  # what is left to write are scores and reports
        return
    need, there = DiskNeed.of(plan), nearest(plan.folder)
    missing = need.total - _held(plan.folder)
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(
            f"output_dir {plan.folder}: the run needs {byte_size(missing)} more there ({need}), and the disk of "
            f"{there} has {byte_size(free)} free: free some, choose another output_dir, or lower train.keep_checkpoints"
        )


def _held(folder: Path) -> int:
    """The bytes that an earlier start of the run has written of what it needs."""
    parts = ("checkpoints", "untrained", "student", "best")
    files = (file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)
