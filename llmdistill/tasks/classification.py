"""The metrics of GLUE, and the averages over its tasks as papers report them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from llmdistill.tasks.glue_files import Metric, task_named


def task_metrics(task_name: str, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Compute the metrics that GLUE reports for a task, times 100.

    F1 is the F1 score of class 1. A correlation, including Matthews's, is undefined if the predictions or the targets
    are constant or not finite; F1 is undefined if class 1 is neither predicted nor a target. An undefined metric is 0,
    without a warning.

    Args:
        task_name: a task of GLUE.
        predictions: (examples,), classes or, for STS-B, scores.
        targets: (examples,), without unknown targets.

    Raises:
        UserError: the task does not exist.
        ValueError: predictions and targets differ in length or are empty, or a target is unknown.
    """
    task = task_named(task_name)
    if predictions.shape != targets.shape or predictions.ndim != 1 or len(targets) == 0:
        raise ValueError(f"predictions of shape {predictions.shape} but targets of shape {targets.shape}")
    if not (np.isin(targets, range(len(task.classes))) if task.classes else np.isfinite(targets)).all():
        raise ValueError(f"{task_name}: a target is unknown")
    return {name: 100 * _METRICS[name](predictions, targets) for name in task.metrics}


def _accuracy(predictions: np.ndarray, targets: np.ndarray) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(targets, predictions))


def _f1(predictions: np.ndarray, targets: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(targets, predictions, pos_label=1, zero_division=0))


def _matthews(predictions: np.ndarray, targets: np.ndarray) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(targets, predictions)) if _vary(predictions, targets) else 0.0


def _pearson(predictions: np.ndarray, targets: np.ndarray) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, predictions, targets)


def _spearman(predictions: np.ndarray, targets: np.ndarray) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, predictions, targets)


def _correlation(measure: Callable, predictions: np.ndarray, targets: np.ndarray) -> float:
    if not _vary(predictions, targets):
        return 0.0
    from scipy.stats import NearConstantInputWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NearConstantInputWarning)
        return float(measure(predictions.astype(np.float64), targets.astype(np.float64)).statistic)


def _vary(*arrays: np.ndarray) -> bool:
    return all(np.isfinite(array).all() and np.ptp(array) > 0 for array in arrays)


_METRICS: dict[Metric, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}

Convention = Literal["makd", "minilm", "minilmv2", "minilmv2_test"]

SQUAD2 = "SQuAD2"
"""The column of SQuAD 2.0, the only one that is not part of GLUE."""

CONVENTIONS: dict[Convention, dict[str, Metric]] = {
    "makd": {
        "RTE": "accuracy",
        "MRPC": "f1",
        "STS-B": "pearson",
        "CoLA": "matthews",
        "SST-2": "accuracy",
        "QNLI": "accuracy",
        "QQP": "accuracy",
        "MNLI-m": "accuracy",
        "MNLI-mm": "accuracy",
    },
    "minilm": {
        SQUAD2: "f1",
        "MNLI-m": "accuracy",
        "SST-2": "accuracy",
        "QNLI": "accuracy",
        "CoLA": "matthews",
        "RTE": "accuracy",
        "MRPC": "accuracy",
        "QQP": "accuracy",
    },
    "minilmv2": {
        SQUAD2: "f1",
        "MNLI-m": "accuracy",
        "QNLI": "accuracy",
        "QQP": "accuracy",
        "RTE": "accuracy",
        "SST-2": "accuracy",
        "MRPC": "accuracy",
        "CoLA": "matthews",
    },
    "minilmv2_test": {
        SQUAD2: "f1",
        "MNLI-m": "accuracy",
        "MNLI-mm": "accuracy",
        "QNLI": "accuracy",
        "QQP": "f1",
        "RTE": "accuracy",
        "SST-2": "accuracy",
        "MRPC": "f1",
        "CoLA": "matthews",
        "STS-B": "spearman",
    },
}
"""The columns of MaKD Table 1, MiniLM Table 2, MiniLMv2 Table 1 (dev) and Tables 2 and 9 (test), with the metric of
each column. The average gives all columns equal weight: MNLI-m and MNLI-mm are two columns, and SQuAD 2.0 has the same
weight as the others."""


@dataclass(frozen=True)
class Average:
    """The average over the available columns of a paper's table."""

    glue: float | None
    """The average over the available columns of GLUE; None if no column is available."""
    overall: float | None
    """The average including SQuAD 2.0, which papers with this column report; None if SQuAD 2.0 is not available."""
    missing: tuple[str, ...]
    """The missing columns; if there are any, the average cannot be compared with the paper's."""


def average_of(scores: Mapping[str, Mapping[str, float]], convention: Convention) -> Average:
    """Compute the average over the columns of a paper.

    Args:
        scores: the metrics of each column by name, as task_metrics returns them. The names of the columns are those of
            `tasks.glue_files.column_of` (MNLI-m, MNLI-mm, CoLA ...) and SQUAD2. Columns that the paper does not have
            are ignored.
        convention: the paper whose columns are used.
    """
    columns = CONVENTIONS[convention]
    there = {name: scores[name][metric] for name, metric in columns.items() if metric in scores.get(name, {})}
    glue = [score for name, score in there.items() if name != SQUAD2]
    return Average(
        glue=fmean(glue) if glue else None,
        overall=fmean(there.values()) if SQUAD2 in there else None,
        missing=tuple(name for name in columns if name not in there),
    )
