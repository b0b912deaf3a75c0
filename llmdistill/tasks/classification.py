"""The metrics of GLUE, and the averages over its tasks as papers report them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from llmdistill.data.pairs import PairExample
from llmdistill.tasks.glue_files import TABLES, TASKS, Metric, column_of, task_named


def task_metrics(task_name: str, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Compute the metrics that GLUE reports for a task, times 100.

    F1 is the F1 score of class 1. A correlation, including Matthews's, is undefined if the predictions or the targets
    are constant or not finite; F1 is undefined if class 1 is neither predicted nor a target. An undefined metric is 0,
    without a warning.

    Args:
        task_name: a task of GLUE.
        predictions: (examples,), classes or, for STS-B, scores.
        targets: (examples,), all known.

    Raises:
        UserError: the task does not exist.
        ValueError: predictions and targets differ in length or are empty, or a target is unknown.
    """
    task = task_named(task_name)
    if predictions.shape != targets.shape or predictions.ndim != 1 or len(targets) == 0:
        raise ValueError(f"predictions of shape {predictions.shape} but targets of shape {targets.shape}")
    if not (np.isin(targets, range(len(task.classes))) if task.classes else np.isfinite(targets)).all():
        raise ValueError(f"{task_name}: a target is unknown")
    return {name: 100 * _metric(name, predictions, targets) for name in task.metrics}


def _metric(name: Metric, predictions: np.ndarray, targets: np.ndarray) -> float:
    from scipy import stats
    from sklearn import metrics

    if name == "accuracy":
        return float(metrics.accuracy_score(targets, predictions))
    if name == "f1":
        return float(metrics.f1_score(targets, predictions, pos_label=1, zero_division=0))
    if not all(np.isfinite(values).all() and np.ptp(values) > 0 for values in (predictions, targets)):
        return 0.0
    if name == "matthews":
        return float(metrics.matthews_corrcoef(targets, predictions))
    correlation = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        return float(correlation(predictions.astype(np.float64), targets.astype(np.float64)).statistic)


def targets_of(examples: Sequence[PairExample]) -> np.ndarray:
    """Return the target of each example: (examples,)."""
    return np.array([example.target for example in examples])


def main_score(task: str, scores: Mapping[str, Mapping[str, float]]) -> float:
    """Return the metric by which settings are chosen; for MNLI it is that of the matched split."""
    return scores[column_of(task, "dev")][TASKS[task].metrics[0]]


def chance_score(task: str, examples: Sequence[PairExample]) -> float:
    """Return the main metric of the best constant prediction."""
    named, targets = TASKS[task], targets_of(examples)
    constants = range(len(named.classes)) if named.classes else [0.0]
    return max(task_metrics(task, np.full_like(targets, value), targets)[named.metrics[0]] for value in constants)


Convention = Literal["makd", "minilm", "minilmv2", "minilmv2_test"]

SQUAD2 = "SQuAD2"
"""The column of SQuAD 2.0, the only one that is not part of GLUE."""

CONVENTIONS: dict[Convention, dict[str, Metric]] = TABLES["averages"]
"""The columns of each paper's table, with the metric of each column."""


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
    """Compute the average over the columns of a paper; other columns are ignored.

    The names of the columns are those of `tasks.glue_files.column_of` (MNLI-m, MNLI-mm, CoLA ...) and SQUAD2; each has
    metrics as task_metrics returns them.
    """
    columns = CONVENTIONS[convention]
    there = {name: scores[name][metric] for name, metric in columns.items() if metric in scores.get(name, {})}
    glue = [score for name, score in there.items() if name != SQUAD2]
    return Average(
        glue=fmean(glue) if glue else None,
        overall=fmean(there.values()) if SQUAD2 in there else None,
        missing=tuple(name for name in columns if name not in there),
    )
