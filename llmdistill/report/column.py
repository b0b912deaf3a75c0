"""A column of a published table, in a module of its own that --help loads without the libraries of the reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of published figures, and the score here that stands beside it."""

    label: str
    """The heading."""
    column: str
    """The column in the scores of a task, such as MNLI-m, SQuAD2 or MLQA-de."""
    metric: str
    """The metric of that column, such as accuracy or best_f1; its values are those of the task, nearly all x 100."""
    on_server: bool = False
    """Whether the published figures are those of GLUE's server on the test set. Here a fine-tuning scores the dev set
    and writes the files for the server."""
