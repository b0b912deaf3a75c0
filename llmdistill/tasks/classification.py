"""Metrics of classes and scores; those of text are in `text_metrics`, those of answers in `squad_metrics`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import numpy as np

from llmdistill.data.pairs import EncodedPair, PairExample

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]


def compute_metric(name: Metric, predictions: np.ndarray, targets: np.ndarray) -> float:
    """Compute a metric, from -1 or 0 to 1; one that is undefined is 0. F1 is that of class 1."""
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
    return compute_metric("spearman", predictions, targets)


def list_targets(examples: Sequence[PairExample | EncodedPair]) -> np.ndarray:
    """Return the target of each example: (examples,)."""
    return np.array([example.target for example in examples])
