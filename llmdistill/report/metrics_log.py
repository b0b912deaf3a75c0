"""Reads metrics.jsonl, the log of a run: its column names and its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

METRICS_LOG = "metrics.jsonl"
"""File in the run's folder."""

FIGURES = (
    "step",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens",
    "tokens_per_second",
    "padding_share",
    "teacher_share",
    "peak_memory_bytes",
    "skipped_steps",
    "valid_loss",
    "valid_score",
)
"""The columns that every run may have; every other column is a term of the loss."""


Log = list[dict[str, float]]
"""The rows of a run's log in order."""


def read_metrics_log(folder: Path) -> Log:
    """Read the rows of a run's log in order; the list is empty if the run trained nothing."""
    file = folder / METRICS_LOG
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def term_names(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of the loss terms in a log, in the order of its columns."""
    return [name for name in rows[-1] if name not in FIGURES] if rows else []
