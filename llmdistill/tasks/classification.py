"""GLUE's metrics, the files for its server, and the averages over its tasks as papers report them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np

from llmdistill.data.pairs import EncodedPair, PairExample
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.tasks.glue_files import BEST_SCORE, GLUE_TASKS, TABLES, GlueTask, Metric


def write_submission(
    path: Path, task: GlueTask, examples: Sequence[PairExample | EncodedPair], predictions: np.ndarray
) -> None:
    """Write one file of a submission to the GLUE server, such as MNLI-mm.tsv; the server takes a zip of all files.

    Each line contains the number of the example and the prediction: the text of the label, or a score with three
    decimals within the range of STS-B.

    Raises:
        UserError: a score is not finite.
    """
    texts = {}
    for example, value in zip(examples, map(float, predictions), strict=True):
        place = f"{path.stem}: example {example.index}"
        if task.classes:
            assert value in range(len(task.classes)), f"{place}: {value} is no class of {', '.join(task.classes)}"
            texts[example.index] = task.classes[int(value)]
        elif np.isfinite(value):
            texts[example.index] = f"{min(max(value, 0.0), BEST_SCORE):.3f}"
        else:
            raise UserError(f"{place}: the predicted score is {value}; the model is broken, train it anew")
    assert len(texts) == len(examples), "two examples have the same number"
    lines = [f"{index}\t{text}\n" for index, text in sorted(texts.items())]
    write_text(path, "".join(["index\tprediction\n", *lines]))


def task_metrics(task_name: str, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Compute the metrics that GLUE reports for a task, times 100.

    Predictions and targets are classes or, for STS-B, scores: (examples,). F1 is that of class 1. A correlation,
    including Matthews's, is undefined if the predictions or the targets are constant or not finite; F1 is undefined if
    class 1 is neither predicted nor a target. An undefined metric is 0, without a warning.
    """
    return {name: 100 * _compute_metric(name, predictions, targets) for name in GLUE_TASKS[task_name].metrics}


def _compute_metric(name: Metric, predictions: np.ndarray, targets: np.ndarray) -> float:
    # Imported here, because a training that computes no metric need not wait for the two libraries.
    from scipy import stats
    from sklearn import metrics

    if name == "accuracy":
        return float(metrics.accuracy_score(targets, predictions))
    if name == "f1":
        return float(metrics.f1_score(targets, predictions, pos_label=1, zero_division=0))
    # scipy and scikit-learn return nan or raise for such values, depending on the metric and the version.
    if not all(np.isfinite(values).all() and np.ptp(values) > 0 for values in (predictions, targets)):
        return 0.0
    if name == "matthews":
        return float(metrics.matthews_corrcoef(targets, predictions))
    correlation = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}[name]
    with warnings.catch_warnings():
        # Early in training a model predicts nearly the same score for every pair; scipy would warn in each validation.
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        # scipy computes in the precision of its inputs, and predictions come in fp32.
        return float(correlation(predictions.astype(np.float64), targets.astype(np.float64)).statistic)


def rank_correlation(predictions: np.ndarray, targets: np.ndarray) -> float:
    """Return Spearman's rank correlation, -1 to 1; 0 if either side is constant or not finite."""
    return _compute_metric("spearman", predictions, targets)


def targets_of(examples: Sequence[PairExample | EncodedPair]) -> np.ndarray:
    """Return the target of each example: (examples,)."""
    return np.array([example.target for example in examples])


def chance_score(task: str, examples: Sequence[PairExample | EncodedPair], metric: Metric) -> float:
    """Return the metric of the best constant prediction."""
    glue_task, targets = GLUE_TASKS[task], targets_of(examples)
    constants = range(len(glue_task.classes)) if glue_task.classes else [0.0]
    return max(task_metrics(task, np.full_like(targets, value), targets)[metric] for value in constants)


Convention = Literal["makd", "minilm", "minilmv2", "minilmv2_test", "kroneckerbert"]

SQUAD2 = "SQuAD2"
"""The column of SQuAD 2.0, the only one that is not part of GLUE."""

CONVENTIONS: dict[Convention, dict[str, Metric]] = TABLES["averages"]
"""The columns of each paper's table, with the metric of each column."""


def average_of(scores: Mapping[str, Mapping[str, float]], convention: Convention) -> dict[str, Any]:
    """Compute the average over the columns of a paper; other columns are ignored.

    The names of the columns are those of `tasks.glue_files.column_of` (MNLI-m, MNLI-mm, CoLA ...) and SQUAD2; each has
    metrics as task_metrics and `squad_metrics.squad2_scores` return them.

    Returns:
        ``glue``, the average over the available columns of GLUE (None without any); ``overall``, the average including
        SQuAD 2.0, which papers with this column report (None without it); and ``missing``, the columns without scores:
        if there are any, the average cannot be compared with the paper's.
    """
    columns = CONVENTIONS[convention]
    available = {name: scores[name][metric] for name, metric in columns.items() if metric in scores.get(name, {})}
    glue = [score for name, score in available.items() if name != SQUAD2]
    return {
        "glue": fmean(glue) if glue else None,
        "overall": fmean(available.values()) if SQUAD2 in available else None,
        "missing": [name for name in columns if name not in available],
    }
