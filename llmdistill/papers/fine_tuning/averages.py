"""The averages over the tasks of GLUE, and SQuAD 2.0, as the papers report them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import yaml

from llmdistill.tasks.classification import Metric

Convention = Literal["makd", "minilm", "minilmv2", "minilmv2_test", "kroneckerbert"]

SQUAD2 = "SQuAD2"
"""The column of SQuAD 2.0, the only one that is not part of GLUE."""

CONVENTIONS: dict[Convention, dict[str, Metric]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""The columns of each paper's table, with the metric of each column."""


def average_of(scores: Mapping[str, Mapping[str, float]], convention: Convention) -> dict[str, Any]:
    """Compute the average over the columns of a paper; other columns are ignored.

    The names of the columns are those of `tasks.glue.column_of` (MNLI-m, MNLI-mm, CoLA ...) and SQUAD2; each has
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
