"""metrics.jsonl, the log of a run: the names of its columns, and its rows."""

from __future__ import annotations

import json
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
    "valid_loss",
)
"""Columns of the run itself; every other column is a term of the loss."""


def read_metrics_log(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's log, in order; none where nothing was trained."""
    file = folder / METRICS_LOG
    if not file.is_file():
        return []
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def term_names(rows: list[dict[str, float]]) -> list[str]:
    """The terms of the loss that a log has columns of, in their order."""
    return [name for name in rows[-1] if name not in FIGURES] if rows else []
