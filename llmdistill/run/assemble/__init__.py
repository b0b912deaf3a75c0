"""The one place where settings become objects: teacher, student, batches, trainer. Nobody below it reads the plan."""

from __future__ import annotations

from llmdistill.run.assemble.data import RunData, check_responses, count_steps, make_loader, read_data, tokenise_texts
from llmdistill.run.assemble.models import check_machine, load_scored, make_teacher, prepare_student
from llmdistill.run.assemble.training import make_score_book, make_trainer

__all__ = [
    "RunData",
    "check_machine",
    "check_responses",
    "count_steps",
    "load_scored",
    "make_loader",
    "make_score_book",
    "make_teacher",
    "make_trainer",
    "prepare_student",
    "read_data",
    "tokenise_texts",
]
