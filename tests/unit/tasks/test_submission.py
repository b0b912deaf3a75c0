from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmdistill.errors import UserError
from llmdistill.tasks.glue_files import TASKS, Split
from llmdistill.tasks.predict import write_predictions


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
    path = write_predictions(tmp_path / "new", task, split, np.array(predictions), [10, 9])
    assert path == tmp_path / "new" / name
    assert path.read_text() == f"index\tprediction\n9\t{texts[0]}\n10\t{texts[1]}\n"


def test_every_task_has_a_file_of_its_own(tmp_path: Path) -> None:
    for task in TASKS:
        write_predictions(tmp_path, task, "test", np.array([1]), [0])
    write_predictions(tmp_path, "MNLI", "test_mismatched", np.array([1]), [0])
    assert len(list(tmp_path.glob("*.tsv"))) == 10


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="RTE: the GLUE server takes predictions of test splits, not of dev"):
        write_predictions(tmp_path, "RTE", "dev", np.array([1]), [0])
    with pytest.raises(UserError, match="RTE has no split test_mismatched"):
        write_predictions(tmp_path, "RTE", "test_mismatched", np.array([1]), [0])
    with pytest.raises(UserError, match="GLUE has no task 'AX'"):
        write_predictions(tmp_path, "AX", "test", np.array([1]), [0])
    with pytest.raises(UserError, match="STS-B: example 1: the predicted score is nan"):
        write_predictions(tmp_path, "STS-B", "test", np.array([1, np.nan]), [0, 1])
    for wrong in (2, -100, 0.5):
        with pytest.raises(ValueError, match=r"RTE: example 4: .* is no class of entailment, not_entailment"):
            write_predictions(tmp_path, "RTE", "test", np.array([wrong]), [4])
    for predictions, indices in (([1, 1], [0]), ([1, 1], [3, 3]), ([[1, 1]], [0, 1])):
        with pytest.raises(ValueError, match="RTE: predictions of shape"):
            write_predictions(tmp_path, "RTE", "test", np.array(predictions), indices)
    assert not list(tmp_path.iterdir())
