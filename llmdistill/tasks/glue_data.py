"""The tasks of GLUE by the names that users type, and the examples in their files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmdistill.data.pairs import PairExample
from llmdistill.errors import UserError
from llmdistill.tasks import task_key
from llmdistill.tasks.glue_files import TASKS, GlueTask, Split, read_split


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskFiles:
    """A task with its examples. Two instances are equal if their training and dev examples are equal."""

    name: str
    """The name of the task in TASKS."""
    train: list[PairExample]
    dev: dict[Split, list[PairExample]]
    """The split dev, and dev_mismatched if the task has it."""
    test: dict[Split, list[PairExample]]
    """The split test, and test_mismatched if the task has it; empty without test files."""
    digest: str
    """A digest of the training and dev examples."""

    def __eq__(self, other: object) -> bool:
        """Return whether the task and its training and dev examples are the same."""
        return isinstance(other, TaskFiles) and (self.name, self.digest) == (other.name, other.digest)

    def __hash__(self) -> int:
        """Return the hash of the training and dev examples."""
        return hash((self.name, self.digest))

    @property
    def task(self) -> GlueTask:
        """The properties of the task in GLUE."""
        return TASKS[self.name]


def find_tasks(names: Sequence[str] | None, *, key: str) -> list[str]:
    """Return GLUE's names of the tasks that the user typed (rte, sst2, STS-B); return all tasks for None.

    Args:
        names: the names that the user typed.
        key: the setting, for error messages.

    Raises:
        UserError: a task does not exist, or is named twice.
    """
    if names is None:
        return list(TASKS)
    found = [glue_name(task_key(name, key=key), key=key) for name in names]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{key}: {twice} is named twice; name each task once")
    return found


def glue_name(task: str, *, key: str = "data.task.name") -> str:
    """Return GLUE's name for a task in `tasks.TASKS`, such as SST-2 for sst2.

    Raises:
        UserError: the task is not a task of GLUE.
    """
    named = {glue.hub: name for name, glue in TASKS.items()}
    if task not in named:
        raise UserError(f"{key}: {task} is no task of GLUE (these are {', '.join(named)})")
    return named[task]


def check_data_dir(data_dir: str | None, names: Sequence[str], *, key: str) -> None:
    """Check that the folder has a subfolder for each task; raise UserError otherwise."""
    if data_dir is None:
        return
    if not Path(data_dir).is_dir():
        raise UserError(f"{key} {data_dir}: no such folder; give that of GLUE's own download, or none for the hub")
    missing = [name for name in names if not (Path(data_dir) / name).is_dir()]
    if missing:
        there = [name for name in TASKS if (Path(data_dir) / name).is_dir()]
        raise UserError(
            f"{key} {data_dir}: it has no folder {missing[0]} (of GLUE's tasks it has "
            f"{', '.join(there) or 'none'}); add it, or name a task that is there"
        )


def read_task(name: str, data_dir: str | None, limit: int | None) -> TaskFiles:
    """Read the examples of a task, with only the first `limit` examples of the training set.

    Raises:
        UserError: a file is missing or malformed.
    """
    mismatched = TASKS[name].has_mismatched
    dev_splits: list[Split] = ["dev", "dev_mismatched"] if mismatched else ["dev"]
    test_splits: list[Split] = ["test", "test_mismatched"] if mismatched else ["test"]
    train = read_split(name, "train", data_dir)[:limit]
    dev = {split: read_split(name, split, data_dir) for split in dev_splits}
    has_test = data_dir is None or _has_test(Path(data_dir) / name)
    test = {split: read_split(name, split, data_dir) for split in test_splits} if has_test else {}
    digest = hashlib.sha256()
    for example in (example for examples in (train, *dev.values()) for example in examples):
        digest.update(repr((example.sentence1, example.sentence2, example.target)).encode())
    return TaskFiles(name=name, train=train, dev=dev, test=test, digest=digest.hexdigest()[:16])


def _has_test(folder: Path) -> bool:
    return any(folder.glob("test*.tsv")) or (folder / "msr_paraphrase_test.txt").is_file()
