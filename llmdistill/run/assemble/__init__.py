"""The package that creates teacher, student, batches and trainer from a plan; lower modules do not read the plan."""

from __future__ import annotations

from llmdistill.run.assemble.data import count_steps, share_of
from llmdistill.run.assemble.models import check_machine, load_scored, load_student, make_teacher, prepare_student
from llmdistill.run.assemble.training import make_trainer

__all__ = [
    "check_machine",
    "count_steps",
    "load_scored",
    "load_student",
    "make_teacher",
    "make_trainer",
    "prepare_student",
    "share_of",
]
