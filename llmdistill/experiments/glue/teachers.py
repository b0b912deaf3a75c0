"""The fine-tuned teachers of a run: where they are, and whether they fit the student and the task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from llmdistill.errors import UserError
from llmdistill.models.load import load_config, load_tokenizer
from llmdistill.tasks.glue_files import TASKS

BEST = "best"
"""Folder of a task's best model, in the task's."""


def teacher_of(teacher: str, task: str, tasks: Sequence[str], *, key: str = "--teacher") -> str:
    """The folder or hub name of a task's teacher, or of another model that is fine-tuned on it.

    Args:
        teacher: an earlier run's folder, a path with {task} in it, or a model itself.
        task: in TASKS.
        tasks: all that are run: a model itself can teach only one.
        key: the setting, for messages.

    Raises:
        UserError: the folder has no model for the task, or one model stands for several tasks.
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


def check_classes(config: PreTrainedConfig, task: str, *, named: str) -> None:
    """Whether a fine-tuned model has the task's number of classes. UserError, with `named` in it, where it has not."""
    found, wanted = config.num_labels, len(TASKS[task].classes) or 1
    if found != wanted:
        raise UserError(
            f"{named}: it tells {found} classes apart, but {task} has {wanted}"
            f"{'' if TASKS[task].classes else ' (a score)'}; give one that is fine-tuned on {task}"
        )


def check_teacher(teacher: str, model: str | Path, task: str) -> PreTrainedConfig:
    """The config of a teacher that answers the task, in the student's tokens.

    Raises:
        UserError: it cannot be read, has another number of classes, or another tokenizer.
    """
    config = load_config(teacher)
    check_classes(config, task, named=f"--teacher {teacher}")
    check_tokens(teacher, model)
    return config


def check_tokens(teacher: str | Path, model: str | Path) -> None:
    """Whether a teacher sees the student's tokens. UserError where their tokenizers differ."""
    if load_tokenizer(teacher).get_vocab() != load_tokenizer(model).get_vocab():
        raise UserError(
            f"--teacher {teacher}: its tokenizer is not that of {model}, and both see the same tokens; give a teacher "
            "with the student's tokenizer"
        )


def short_names(paths: Sequence[str]) -> list[str]:
    """A name for each path: as many of its last parts as it takes to tell them apart."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
