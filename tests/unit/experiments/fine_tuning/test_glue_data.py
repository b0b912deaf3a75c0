from __future__ import annotations

import pytest

from llmdistill.errors import UserError
from llmdistill.tasks.benchmark import find_benchmarks
from llmdistill.tasks.glue import Glue
from llmdistill.tasks.glue_files import GLUE_TASKS, read_task


def test_tasks_by_what_users_type() -> None:
    assert find_benchmarks(["rte", "cola", "sst2", "STS-B", "mnli"], setting="--tasks") == [
        *("RTE", "CoLA", "SST-2", "STS-B", "MNLI")
    ]
    assert find_benchmarks(["squad2", "SQuAD1", "MLQA"], setting="--tasks") == ["SQuAD2", "SQuAD1", "MLQA"]
    assert [find_benchmarks([task.hub], setting="--tasks") for task in GLUE_TASKS.values()] == [
        [name] for name in GLUE_TASKS
    ]


def test_folders_that_are_not_there(data) -> None:
    for folder in (str(data), None):
        Glue.check_folder(folder, "rte", setting="--data_dir")
    with pytest.raises(UserError, match="no such folder"):
        Glue.check_folder(str(data / "nowhere"), "rte", setting="--data_dir")
    with pytest.raises(UserError, match=r"^--data_dir .*no folder WNLI.*it has CoLA, STS-B, MNLI, RTE"):
        Glue.check_folder(str(data), "wnli", setting="--data_dir")


def test_a_task_s_splits(data) -> None:
    found = read_task("MNLI", str(data), 10)
    assert {split: len(each.examples) for split, each in found.sets.items()} == {
        "dev": 30,
        "dev_mismatched": 20,
        "test": 5,
        "test_mismatched": 6,
    }
    assert found.train == read_task("MNLI", str(data), None).train[:10]
    assert list(read_task("CoLA", str(data), None).sets) == ["dev"]
