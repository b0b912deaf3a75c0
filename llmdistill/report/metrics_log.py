"""Reads metrics.jsonl, the log of a run: its column names and its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmdistill.errors import UserError

METRICS_LOG = "metrics.jsonl"

TOP_SHARED, WRITER_GAP = "top_10_shared", "writer_gap"
"""Columns of `training.own_answers.OwnAnswers`, which explains them."""

FIGURES = (
    *("step", "loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "padding_share", "teacher_share"),
    *("peak_memory_bytes", "skipped_steps", "lowest_loss", "valid_loss", "valid_score", TOP_SHARED, WRITER_GAP),
)
"""The columns that every run may have; every other column is a term of the loss."""

Log = list[dict[str, float]]


def read_metrics_log(folder: Path) -> Log:
    """Read the rows of a run's log, none if it trained nothing. Raises UserError with the line if one is malformed."""
    file = folder / METRICS_LOG
    if not file.is_file():
        return []
    return [row_of(line, f"{file}:{n}") for n, line in enumerate(file.read_bytes().splitlines(), start=1)]


def row_of(line: bytes, where: str) -> dict[str, float]:
    """Read a row of a log. Raises UserError, which begins with `where`, if it is damaged."""
    try:
        row = json.loads(line.decode("utf-8"))
        if not (isinstance(row, dict) and all(isinstance(value, int | float) for value in row.values())):
            raise TypeError("not an object of numbers")
        if "step" not in row:
            raise KeyError("step")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{where}: not a row of a training's log; remove the line, and the run goes on") from error
    return row


def term_names(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names of the loss terms in a log, in the order of its columns."""
    return [name for name in rows[-1] if name not in FIGURES] if rows else []
