from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

from llmdistill.tasks.classification import CONVENTIONS, SQUAD2, Convention, average_of, task_metrics
from llmdistill.tasks.glue_files import GLUE_TASKS


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def counts(predictions: np.ndarray, targets: np.ndarray) -> tuple[int, int, int, int]:
    pairs = list(zip(predictions.tolist(), targets.tolist(), strict=True))
    return pairs.count((1, 1)), pairs.count((1, 0)), pairs.count((0, 1)), pairs.count((0, 0))


def pearson(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    together = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return together / math.sqrt(sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y))


def ranks(x: list[float]) -> list[float]:
    return [sum(b < a for b in x) + (x.count(a) + 1) / 2 for a in x]


def test_binary_metrics_follow_their_formulas() -> None:
    dice = np.random.default_rng(0)
    targets = dice.integers(2, size=200)
    predictions = np.where(dice.random(200) < 0.7, targets, 1)  # leaning to 1, so that the classes are not alike
    tp, fp, fn, tn = counts(predictions, targets)
    accuracy, f1 = (tp + tn) / 200, 2 * tp / (2 * tp + fp + fn)
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert task_metrics("MRPC", predictions, targets) == pytest.approx({"accuracy": 100 * accuracy, "f1": 100 * f1})
    assert task_metrics("QQP", predictions, targets) == pytest.approx({"accuracy": 100 * accuracy, "f1": 100 * f1})
    assert task_metrics("CoLA", predictions, targets) == pytest.approx({"matthews": 100 * matthews})
    for task in ("SST-2", "QNLI", "RTE", "WNLI"):
        assert task_metrics(task, predictions, targets) == pytest.approx({"accuracy": 100 * accuracy})


def test_three_classes() -> None:
    assert task_metrics("MNLI", np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])) == {"accuracy": 75}


def test_correlations_follow_their_formulas() -> None:
    dice = np.random.default_rng(0)
    targets = dice.integers(0, 26, size=60) / 5  # with ties, as in STS-B
    predictions = (np.exp(targets) + dice.normal(scale=9, size=60)).round().astype(np.float32)
    found = task_metrics("STS-B", predictions, targets)
    x, y = predictions.tolist(), targets.tolist()
    assert found == pytest.approx({"pearson": 100 * pearson(x, y), "spearman": 100 * pearson(ranks(x), ranks(y))})
    assert found["spearman"] > found["pearson"] + 5, "the data tell the two apart"


def test_all_right_and_all_wrong() -> None:
    targets, scores = np.array([0, 1, 1]), np.array([0.0, 2.5, 5.0])
    assert task_metrics("MRPC", targets, targets) == {"f1": 100, "accuracy": 100}
    assert task_metrics("CoLA", targets, targets) == pytest.approx({"matthews": 100})
    assert task_metrics("CoLA", 1 - targets, targets) == pytest.approx({"matthews": -100})
    assert task_metrics("STS-B", 5 - scores, scores) == pytest.approx({"pearson": -100, "spearman": -100})


def test_what_is_undefined_counts_as_nothing() -> None:
    targets, scores = np.array([0, 1, 1]), np.array([0.0, 2.5, 5.0])
    for constant in (0, 1):
        assert task_metrics("CoLA", np.full(3, constant), targets) == {"matthews": 0}
        assert task_metrics("CoLA", targets, np.full(3, constant)) == {"matthews": 0}
    assert task_metrics("MRPC", np.zeros(3, dtype=int), np.zeros(3, dtype=int)) == {"f1": 0, "accuracy": 100}
    for broken in (np.full(3, 2.7), np.array([np.nan, 1, 2]), np.array([np.inf, 1, 2])):
        assert task_metrics("STS-B", broken, scores) == {"pearson": 0, "spearman": 0}
    nearly = np.array([1.0, 1.0, 1.0 + 1e-15])
    assert set(task_metrics("STS-B", nearly, scores)) == {"pearson", "spearman"}, "and no warning either"


def test_bad_input() -> None:
    ones = np.ones(3, dtype=int)
    for predictions, targets in ((ones, ones[:2]), (ones[:0], ones[:0]), (np.ones((3, 1)), np.ones((3, 1)))):
        with pytest.raises(ValueError, match="predictions of shape"):
            task_metrics("RTE", predictions, targets)
    for task, target in (("RTE", -100), ("RTE", 2), ("STS-B", np.nan)):
        with pytest.raises(ValueError, match=f"{task}: a target is unknown"):
            task_metrics(task, ones, np.array([0, 1, target]))


# Printed rows: the columns in the order of CONVENTIONS, and the average.
MAKD_TABLE_1 = {
    "BERT-base": ([63.4, 90.4, 87.4, 59.6, 92.5, 90.7, 88.2, 83.3, 83.6], 82.1),
    "DistilBERT4": ([55.7, 82.6, 82.9, 31.4, 90.2, 82.7, 83.8, 78.9, 78.1], 74.0),
    "MiniLMv2 22.7M": ([65.7, 89.5, 85.8, 38.9, 91.0, 88.4, 86.1, 82.2, 82.0], 78.8),
    "MaKD64": ([66.4, 89.6, 85.5, 40.9, 91.0, 88.9, 86.7, 82.4, 82.3], 79.3),
}
MAKD_TABLE_1_OFF = {
    "BERT-small": ([58.3, 83.1, 82.0, 29.5, 89.9, 82.2, 83.4, 77.6, 77.2], 73.6),
    "TinyBERT4": ([67.1, 86.8, 86.6, 34.9, 90.7, 84.9, 85.2, 81.6, 81.5], 77.6),
    "DistilBERT6": ([63.7, 90.2, 86.9, 51.3, 90.7, 87.2, 87.2, 82.0, 82.2], 80.1),
    "TinyBERT6": ([72.2, 90.6, 87.4, 48.2, 92.1, 89.6, 87.4, 83.0, 82.7], 81.4),
    "MiniLMv2 67.0M": ([67.5, 91.2, 87.3, 48.6, 92.2, 89.9, 87.6, 82.8, 82.6], 81.0),
    "MaKD256": ([68.2, 91.3, 87.4, 55.9, 92.5, 90.2, 87.8, 83.0, 82.8], 82.0),
}
MINILM_TABLE_2 = {
    "BERT-base": ([76.8, 84.5, 93.2, 91.7, 58.9, 68.6, 87.3, 91.3], 81.5),
    "BERT-small": ([73.2, 81.8, 91.2, 89.8, 53.5, 67.9, 84.9, 90.6], 79.1),
    "Truncated BERT-base": ([69.9, 81.2, 90.8, 87.9, 41.4, 65.5, 82.7, 90.4], 76.2),
    "DistilBERT": ([70.7, 82.2, 91.3, 89.2, 51.3, 59.9, 87.5, 88.5], 77.6),
    "TinyBERT": ([73.1, 83.5, 91.6, 90.5, 42.8, 72.2, 88.4, 90.6], 79.1),
    "MiniLM": ([76.4, 84.0, 92.0, 91.0, 49.2, 71.5, 88.4, 91.0], 80.4),
}
MINILMV2_TABLE_1 = {
    "RoBERTa-base": ([83.7, 87.6, 92.8, 91.9, 78.7, 94.8, 90.2, 63.6], 85.4),
    "Truncated RoBERTa-base": ([77.9, 84.9, 91.1, 91.3, 67.9, 92.9, 87.5, 55.2], 81.1),
    "6x384 BERT-base": ([72.9, 82.8, 90.3, 90.6, 68.9, 91.3, 86.6, 41.8], 78.2),
    "6x384 BERT-large": ([74.3, 83.0, 90.4, 90.7, 68.5, 91.1, 87.8, 41.6], 78.4),
    "6x384 RoBERTa-large": ([76.4, 84.4, 90.9, 90.8, 69.9, 92.0, 88.7, 42.6], 79.5),
    "6x768 BERT-base": ([76.3, 84.2, 90.8, 91.1, 72.1, 92.4, 88.9, 52.5], 81.0),
    "6x768 BERT-large": ([77.7, 85.0, 91.4, 91.1, 73.0, 92.5, 88.9, 53.9], 81.7),
    "6x768 RoBERTa-large": ([81.6, 87.0, 92.7, 91.4, 78.7, 94.5, 90.4, 54.0], 83.8),
}
MINILMV2_TABLES_2_AND_9 = {
    "BERT-base": ([76.8, 84.6, 83.4, 90.5, 71.2, 66.4, 93.5, 88.9, 52.1, 85.8], 79.3),
    "BERT-large": ([81.9, 86.7, 85.9, 92.7, 72.1, 70.1, 94.9, 89.3, 60.5, 86.5], 82.1),
    "6x768 BERT-base": ([76.3, 83.8, 83.3, 90.2, 70.9, 69.2, 92.9, 89.1, 46.6, 84.3], 78.7),
    "6x768 BERT-large": ([77.7, 84.5, 84.0, 91.5, 71.3, 69.2, 93.0, 89.1, 48.6, 85.1], 79.4),
    "MobileBERT": ([80.2, 84.3, 83.4, 91.6, 70.5, 70.4, 92.6, 88.8, 51.1, 84.8], 79.8),
    "12x384 BERT-large-wwm": ([80.7, 85.9, 84.6, 91.9, 71.4, 71.9, 93.3, 89.2, 44.9, 85.5], 79.9),
    "12x384, more relations": ([80.9, 85.8, 84.8, 92.3, 71.6, 72.0, 93.6, 89.7, 46.6, 86.0], 80.3),
}

KRONECKERBERT_TABLES = {
    "Table 4, KroneckerBERT5": ([82.8, 83.5, 91.2, 87.2, 49.5, 91.1, 89.4, 68.9, 88.1], 81.3),
    "Table 4, KroneckerBERT8": ([82.8, 83.5, 91.1, 87.5, 43.6, 90.9, 90.7, 69.66, 88.0], 80.9),
    "Table 4, DynaBERT": ([83.0, 83.6, 91.6, 83.1, 48.5, 91.0, 90.0, 67.9, 88.2], 80.8),
    "Table 7, KroneckerBERT21": ([80.6, 80.6, 88.9, 86.2, 34.0, 90.0, 87.2, 66.4, 86.4], 77.8),
}


def scores_of(convention: Convention, columns: list[float]) -> dict[str, dict[str, float]]:
    # A second metric beside each, as MRPC's and STS-B's have, must not be taken for the column's.
    named = zip(CONVENTIONS[convention].items(), columns, strict=True)
    return {name: {"accuracy": -1, "f1": -1, "spearman": -1, "pearson": -1, metric: x} for (name, metric), x in named}


@pytest.mark.parametrize(
    ("convention", "columns", "printed"),
    [
        pytest.param(convention, *row, id=f"{convention} {name}")
        for convention, table in (
            ("makd", MAKD_TABLE_1),
            ("minilm", MINILM_TABLE_2),
            ("minilmv2", MINILMV2_TABLE_1),
            ("minilmv2_test", MINILMV2_TABLES_2_AND_9),
            ("kroneckerbert", KRONECKERBERT_TABLES),
        )
        for name, row in table.items()
    ],
)
def test_printed_averages(convention: Convention, columns: list[float], printed: float) -> None:
    average = average_of(scores_of(convention, columns), convention)
    value = average["overall" if SQUAD2 in CONVENTIONS[convention] else "glue"]
    assert average["missing"] == []
    assert value == pytest.approx(printed, abs=0.05 + 1e-9)  # printed with one decimal


@pytest.mark.parametrize(("columns", "printed"), MAKD_TABLE_1_OFF.values(), ids=MAKD_TABLE_1_OFF.keys())
def test_makd_prints_some_averages_below_the_mean_of_its_columns(columns: list[float], printed: float) -> None:
    mean = average_of(scores_of("makd", columns), "makd")["glue"]
    assert mean is not None
    assert 0.05 < mean - printed < 0.13


def test_makd_counts_mnli_as_two_columns() -> None:
    def as_one(columns: list[float]) -> float:
        return (sum(columns[:7]) + (columns[7] + columns[8]) / 2) / 8

    rows = {**MAKD_TABLE_1, **MAKD_TABLE_1_OFF}
    assert [name for name, (columns, printed) in rows.items() if abs(as_one(columns) - printed) <= 0.1] == ["MaKD256"]


def test_columns_that_are_missing_are_named() -> None:
    scores = {"CoLA": {"matthews": 50.0}, "MNLI-m": {"accuracy": 80.0}, "WNLI": {"accuracy": 1.0}, "MRPC": {"f1": 90.0}}
    average = average_of(scores, "minilm")
    assert average == {
        "glue": 65,
        "overall": None,
        "missing": [SQUAD2, "SST-2", "QNLI", "RTE", "MRPC", "QQP"],
    }
    with_squad = average_of({**scores, SQUAD2: {"f1": 50.0, "best_f1": 71.0}}, "minilm")
    assert (with_squad["glue"], with_squad["overall"]) == (65, 67)
    assert average_of({}, "makd")["glue"] is None
    assert average_of({**scores, SQUAD2: {"best_f1": 71.0}}, "makd")["overall"] is None, (
        "MaKD's table has no such column"
    )


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_conventions_ask_for_what_tasks_report(convention: Convention) -> None:
    for column, metric in CONVENTIONS[convention].items():
        task = "MNLI" if column.startswith("MNLI-m") else column
        assert column == SQUAD2 or metric in GLUE_TASKS[task].metrics


def test_metrics_that_the_captions_name() -> None:
    def metrics(column: str) -> list[str | None]:
        return [columns.get(column) for columns in CONVENTIONS.values()]

    assert list(CONVENTIONS) == ["makd", "minilm", "minilmv2", "minilmv2_test", "kroneckerbert"]
    assert metrics("MRPC") == ["f1", "accuracy", "accuracy", "f1", "accuracy"]
    assert metrics("QQP") == ["accuracy", "accuracy", "accuracy", "f1", "accuracy"]
    assert metrics("STS-B") == ["pearson", None, None, "spearman", "pearson"]
    assert metrics("CoLA") == ["matthews"] * 5
    for column in ("RTE", "SST-2", "QNLI", "MNLI-m"):
        assert metrics(column) == ["accuracy"] * 5
