from __future__ import annotations

from llmdistill.tasks.glue_files import read_task


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
