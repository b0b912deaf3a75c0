"""Finds the fine-tuned teachers of a GLUE study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmdistill.errors import UserError
from llmdistill.tasks.glue_files import TASKS

BEST = "best"
"""The folder of a task's best model, inside the task's folder."""


def teacher_of(teacher: str, task: str, tasks: Sequence[str], *, key: str) -> str:
    """Return the folder or hub name of a task's teacher, or of another model that is fine-tuned on the task.

    Args:
        teacher: an earlier run's folder, a path that contains {task}, or a single model.
        task: a name in TASKS.
        tasks: all tasks of the study; a single model can teach only one task.
        key: name of the setting, for error messages.

    Raises:
        UserError: the folder has no model for the task, or a single model is given for several tasks.
    """
    if "{task}" in teacher:
        spellings = [task, task.lower(), TASKS[task].hub]
        paths = [teacher.replace("{task}", spelling) for spelling in spellings]
        return next((path for path in paths if Path(path).is_dir()), paths[-1])
    folder = Path(teacher)
    best = folder / task / BEST
    if (best / "config.json").is_file():
        return str(best)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"{key} {teacher}: it holds no model for {task} (no {best / 'config.json'}); "
            "fine-tune one on it first, or name a path with {task} in it"
        )
    if len(tasks) > 1:
        raise UserError(
            f"{key} {teacher}: one model, but {len(tasks)} tasks; a model is fine-tuned on one: give a path with "
            "{task} in it or an earlier run's folder, or name one task"
        )
    return teacher


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: as many of its last parts as are needed to make the names unique."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
