"""The tasks of a run: which ones are meant, and their examples."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmdistill.data.pairs import PairExample
from llmdistill.errors import UserError
from llmdistill.tasks.glue_files import TASKS, GlueTask, Split, read_split


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task with its examples."""

    name: str
    """In TASKS."""
    train: list[PairExample]
    dev: dict[Split, list[PairExample]]
    """dev, and dev_mismatched where the task has it."""
    test: dict[Split, list[PairExample]]
    """Likewise; empty without test files."""
    digest: str
    """Tells other examples apart."""

    @property
    def task(self) -> GlueTask:
        """What GLUE says of it."""
        return TASKS[self.name]


def find_tasks(names: Sequence[str] | None) -> list[str]:
    """Names in TASKS, from what a user may type for them (rte, sst2, STS-B); all of them for None.

    Raises:
        UserError: there is no such task, or one is named twice.
    """
    if names is None:
        return list(TASKS)
    known = {_plain(name): name for name in TASKS}
    found = []
    for name in names:
        if _plain(name) not in known:
            near = difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"--tasks: GLUE has no task {name!r}{hint} (there are {', '.join(known)})")
        found.append(known[_plain(name)])
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"--tasks: {twice} is named twice; name each task once")
    return found


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def check_data_dir(data_dir: str | None, names: Sequence[str]) -> None:
    """Whether the folder has a folder for each task. Raises UserError where it does not."""
    if data_dir is None:
        return
    if not Path(data_dir).is_dir():
        raise UserError(f"--data_dir {data_dir}: no such folder; give that of GLUE's own download, or none for the hub")
    missing = [name for name in names if not (Path(data_dir) / name).is_dir()]
    if missing:
        there = [name for name in TASKS if (Path(data_dir) / name).is_dir()]
        raise UserError(
            f"--data_dir {data_dir}: it has no folder {missing[0]} (of GLUE's tasks it has "
            f"{', '.join(there) or 'none'}); add it, or name those that are there with --tasks"
        )


def read_task(name: str, data_dir: str | None, limit: int | None) -> TaskData:
    """The examples of a task; of the training set only the first `limit`.

    Raises:
        UserError: files that are missing or malformed.
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
    return TaskData(name=name, train=train, dev=dev, test=test, digest=digest.hexdigest()[:16])


def _has_test(folder: Path) -> bool:
    return any(folder.glob("test*.tsv")) or (folder / "msr_paraphrase_test.txt").is_file()
