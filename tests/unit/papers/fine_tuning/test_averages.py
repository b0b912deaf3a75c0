import pytest

from llmdistill.papers.fine_tuning.averages import CONVENTIONS, SQUAD2, Convention, average_of

PRINTED: dict[Convention, tuple[list[float], float]] = {
    "makd": ([66.4, 89.6, 85.5, 40.9, 91.0, 88.9, 86.7, 82.4, 82.3], 79.3),
    "minilm": ([76.4, 84.0, 92.0, 91.0, 49.2, 71.5, 88.4, 91.0], 80.4),
    "minilmv2": ([81.6, 87.0, 92.7, 91.4, 78.7, 94.5, 90.4, 54.0], 83.8),
    "minilmv2_test": ([80.9, 85.8, 84.8, 92.3, 71.6, 72.0, 93.6, 89.7, 46.6, 86.0], 80.3),
    "kroneckerbert": ([82.8, 83.5, 91.2, 87.2, 49.5, 91.1, 89.4, 68.9, 88.1], 81.3),
}
"""A row of each paper: the columns in the order of CONVENTIONS, and their average."""


@pytest.mark.parametrize("convention", PRINTED)
def test_printed_averages(convention):
    columns, printed = PRINTED[convention]
    # A second metric beside each, as MRPC's and STS-B's have, must not be taken for the column's.
    others = dict.fromkeys(("accuracy", "f1", "spearman", "pearson"), -1)
    named = zip(CONVENTIONS[convention].items(), columns, strict=True)
    average = average_of({name: {**others, metric: x} for (name, metric), x in named}, convention)
    value = average["overall" if SQUAD2 in CONVENTIONS[convention] else "glue"]
    assert average["missing"] == []
    assert value == pytest.approx(printed, abs=0.05 + 1e-9)  # printed with one decimal


def test_columns_that_are_missing_are_named():
    scores = {"CoLA": {"matthews": 50.0}, "MNLI-m": {"accuracy": 80.0}, "WNLI": {"accuracy": 1.0}, "MRPC": {"f1": 90.0}}
    average = average_of(scores, "minilm")
    assert average == {"glue": 65, "overall": None, "missing": [SQUAD2, "SST-2", "QNLI", "RTE", "MRPC", "QQP"]}
    with_squad = average_of({**scores, SQUAD2: {"f1": 50.0, "best_f1": 71.0}}, "minilm")
    assert (with_squad["glue"], with_squad["overall"]) == (65, 67)
    assert average_of({}, "makd")["glue"] is None


def test_metrics_that_the_captions_name():
    assert list(CONVENTIONS) == ["makd", "minilm", "minilmv2", "minilmv2_test", "kroneckerbert"]
    for column, metrics in {
        "MRPC": ["f1", "accuracy", "accuracy", "f1", "accuracy"],
        "QQP": ["accuracy", "accuracy", "accuracy", "f1", "accuracy"],
        "STS-B": ["pearson", None, None, "spearman", "pearson"],
        "CoLA": ["matthews"] * 5,
        **dict.fromkeys(("RTE", "SST-2", "QNLI", "MNLI-m"), ["accuracy"] * 5),
    }.items():
        assert [columns.get(column) for columns in CONVENTIONS.values()] == metrics, column
