"""GLUE's metrics, and the averages over its tasks as papers print them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from llmdistill.tasks.glue_files import Metric, task_named


def task_metrics(task_name: str, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """The metrics that GLUE reports for a task, times 100.

    F1 is that of class 1. Where one side is constant or not finite a correlation (Matthews's too) is undefined, and
    where class 1 is neither predicted nor there so is F1; both then count as 0, without a warning.

    Args:
        task_name: a task of GLUE.
        predictions: (examples,), classes or, for STS-B, scores.
        targets: (examples,), all of them known.

    Raises:
        UserError: no such task.
        ValueError: the two differ in length, are empty, or a target is not known.
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
"""The column of SQuAD 2.0, the one that is not GLUE's."""

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
"""Columns of MaKD Table 1, MiniLM Table 2, MiniLMv2 Table 1 (dev) and Tables 2 and 9 (test), each with the metric that
stands in it. All of them are averaged with equal weight: MNLI-m and MNLI-mm are two columns, and SQuAD 2.0 counts
as any other."""


@dataclass(frozen=True)
class Average:
    """The average of a paper's table, as far as its columns are there."""

    glue: float | None
    """Over GLUE's columns that are there; None where there is none."""
    overall: float | None
    """The same with SQuAD 2.0, which is what a paper that has this column prints; None where it is not there."""
    missing: tuple[str, ...]
    """Columns that are not there: while there are any, the average is not the paper's."""


def average_of(scores: Mapping[str, Mapping[str, float]], convention: Convention) -> Average:
    """The average over a paper's columns.

    Args:
        scores: metrics by name, as task_metrics gives them, for each column under its name in `data.glue.column_of`
            (MNLI-m, MNLI-mm, CoLA ...), and for SQuAD 2.0 under SQUAD2. What the paper does not have is left out.
        convention: whose columns.
    """
    columns = CONVENTIONS[convention]
    there = {name: scores[name][metric] for name, metric in columns.items() if metric in scores.get(name, {})}
    glue = [score for name, score in there.items() if name != SQUAD2]
    return Average(
        glue=fmean(glue) if glue else None,
        overall=fmean(there.values()) if SQUAD2 in there else None,
        missing=tuple(name for name in columns if name not in there),
    )
