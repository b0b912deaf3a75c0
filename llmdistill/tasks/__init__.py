"""The tasks, which define what is learned and how it is scored, with one file per task, and their metrics.

A new task is a class of `base.Task` in a file of its own, and an entry in TASKS; another package names it as an entry
point of the group `llmdistill.tasks`.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from llmdistill.config.strict import did_you_mean
from llmdistill.errors import UserError
from llmdistill.plugins import plugins

if TYPE_CHECKING:
    from llmdistill.config import RunConfig
    from llmdistill.tasks.base import Task

_GLUE = "llmdistill.tasks.glue:Glue"
_SQUAD = "llmdistill.tasks.squad:Squad"
_WRITING = "llmdistill.papers.writing:Writing"
_KINDS = {"instructions", "text", "sentences"}

TASKS: dict[str, type[Task] | str] = {
    "instructions": "llmdistill.tasks.instructions:Instructions",
    "text": "llmdistill.tasks.text:Text",
    "sentences": "llmdistill.tasks.sentences:Sentences",
    **dict.fromkeys(("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"), _GLUE),
    "xnli": "llmdistill.papers.xnli:Xnli",
    **dict.fromkeys(("squad1", "squad2", "mlqa"), _SQUAD),
    **dict.fromkeys(("questiongeneration", "summarization", "xsum", "cnndailymail"), _WRITING),
}
"""The tasks by data.kind or, for data.kind task, by data.task.name (only letters and digits, in lower case). A value is
a class or its import path, so that a command imports only the tasks that it needs."""


def make_task(config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> Task:
    """Create the task of a run that trains a student, or only scores models.

    teacher_writes: whether the training set must consist of answers of the teacher.

    Raises:
        UserError: the task does not exist, or its settings are invalid.
    """
    name = config.data.kind if config.data.kind != "task" else task_key(str(config.data.task.name))
    return task_class(name)(config, trains=trains, teacher_writes=teacher_writes)


def task_class(key: str) -> type[Task]:
    """Return the class of a task by its key in TASKS."""
    entry = TASKS[key]
    return resolve_name(entry) if isinstance(entry, str) else entry


def task_key(name: str, *, key: str = "data.task.name") -> str:
    """Return the key in TASKS for a task name that the user typed (rte, SST-2).

    Raises:
        UserError: the task does not exist.
    """
    normalized = plain_name(name)
    if not is_task(name):
        # The names of data.kind are keys of TASKS too, but data.task.name does not take them.
        known = [task for task in TASKS if task not in _KINDS]
        raise UserError(
            f"{key}: there is no task {name!r}{did_you_mean(normalized, known)} (there are {', '.join(known)})"
        )
    return normalized


def is_task(name: str) -> bool:
    """Return whether a name, in any spelling, is that of a task that data.task.name takes, such as rte or SST-2."""
    return plain_name(name) in TASKS.keys() - _KINDS


def task_folder(folder: str, name: str) -> str:
    """Return the folder of a task in data.task.dir, in any spelling; return data.task.dir itself if there is none."""
    paths = sorted(Path(folder).iterdir()) if Path(folder).is_dir() else []
    return str(next((path for path in paths if path.is_dir() and plain_name(path.name) == plain_name(name)), folder))


def plain_name(name: str) -> str:
    """Return a name with only letters and digits, in lower case."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


# Below the functions that it needs: the keys of other packages are normalized as the names that users type are.
TASKS |= {plain_name(plugin.name): plugin.value for plugin in plugins("llmdistill.tasks", TASKS, key=plain_name)}
