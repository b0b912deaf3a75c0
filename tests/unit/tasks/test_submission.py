from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmdistill.data.pairs import PairExample
from llmdistill.errors import UserError
from llmdistill.tasks.classification import write_submission
from llmdistill.tasks.glue_files import GLUE, GLUE_TASKS, Split, column_of


def examples(*indices: int) -> list[PairExample]:
    return [PairExample("a", "b", None, index) for index in indices]


@pytest.mark.parametrize(
    ("task", "split", "predictions", "name", "texts"),
    [
        ("CoLA", "test", [1, 0], "CoLA.tsv", ["0", "1"]),
        ("SST-2", "test", [1, 0], "SST-2.tsv", ["0", "1"]),
        ("MRPC", "test", [1, 0], "MRPC.tsv", ["0", "1"]),
        ("QQP", "test", [1, 0], "QQP.tsv", ["0", "1"]),
        ("WNLI", "test", [1, 0], "WNLI.tsv", ["0", "1"]),
        ("STS-B", "test", [5.2, -0.1], "STS-B.tsv", ["0.000", "5.000"]),
        ("STS-B", "test", [1.23456, 3], "STS-B.tsv", ["3.000", "1.235"]),
        ("MNLI", "test", [2, 0], "MNLI-m.tsv", ["entailment", "contradiction"]),
        ("MNLI", "test_mismatched", [1, 0], "MNLI-mm.tsv", ["entailment", "neutral"]),
        ("QNLI", "test", [1, 0], "QNLI.tsv", ["entailment", "not_entailment"]),
        ("RTE", "test", [1, 0], "RTE.tsv", ["entailment", "not_entailment"]),
    ],
)
def test_files(tmp_path: Path, task: str, split: Split, predictions: list[float], name: str, texts: list[str]) -> None:
    path = tmp_path / "new" / f"{column_of(task, split)}.tsv"
    write_submission(path, GLUE_TASKS[task], examples(10, 9), np.array(predictions))
    assert path == tmp_path / "new" / name
    assert path.read_text() == f"index\tprediction\n9\t{texts[0]}\n10\t{texts[1]}\n"


def test_every_task_has_a_file_of_its_own() -> None:
    columns = {column_of(task, "test") for task in GLUE} | {column_of("MNLI", "test_mismatched")}
    assert len(columns) == 10


def test_bad_input(tmp_path: Path) -> None:
    path, numbers = tmp_path / "STS-B.tsv", np.array([1, np.nan])
    with pytest.raises(UserError, match="STS-B: example 1: the predicted score is nan"):
        write_submission(path, GLUE_TASKS["STS-B"], examples(0, 1), numbers)
    for wrong in (2, -100, 0.5):
        with pytest.raises(AssertionError, match=r"RTE: example 4: .* is no class of entailment, not_entailment"):
            write_submission(tmp_path / "RTE.tsv", GLUE_TASKS["RTE"], examples(4), np.array([wrong]))
    with pytest.raises(ValueError, match="zip"):
        write_submission(path, GLUE_TASKS["RTE"], examples(0), np.array([1, 1]))
    with pytest.raises(AssertionError, match="the same number"):
        write_submission(path, GLUE_TASKS["RTE"], examples(3, 3), np.array([1, 1]))
    assert not list(tmp_path.iterdir())
