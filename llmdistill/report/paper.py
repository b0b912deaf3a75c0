"""The papers' tables of scores (suites/PAPER-tableN.yaml): the published figures, and what runs each row here.

--help loads this module, which needs none of the libraries of the reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

from llmdistill.config.tasks import ProtocolName

_SUITES = resources.files("llmdistill") / "suites"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of published figures, and the score here that stands beside it."""

    label: str
    column: str
    """The column in the scores of a task, such as MNLI-m, SQuAD2 or MLQA-de."""
    metric: str
    """The metric of that column, such as accuracy or best_f1; its values are those of the task, nearly all x 100."""
    on_server: bool = False
    """Whether the published figures are those of GLUE's server on the test set. Here a fine-tuning scores the dev set
    and writes the files for the server."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A model of a table: exactly one of `recipe`, `model` and `missing` is given."""

    name: str
    label: str
    published: tuple[float | None, ...]
    """The figure of each column, and last the average if the table has one; None where the paper has no figure."""
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings that differ from the recipe's, by dotted key."""
    model: str | None = None
    missing: str | None = None
    at: float | None = None
    """The row's number on the axis of the table's plot, such as a layer."""
    line: str = ""
    """The name of its line in the plot, where there are several."""
    average_note: str | None = None
    """The mean of the published figures, where the paper's own average is another."""


@dataclass(frozen=True, kw_only=True)
class PublishedTable:
    """A table of a paper: its rows and columns, in the paper's order."""

    name: str
    title: str
    tasks: tuple[str, ...]
    """The tasks that the models are fine-tuned on, as keys of `tasks.TASKS`; none if a suite scores them."""
    out_of_domain: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other data sets that also score the fine-tuned models, as in `data.task.out_of_domain` of a run."""
    columns: tuple[Column, ...]
    rows: tuple[TableRow, ...]
    suite: str | None = None
    """The suite of `llmdistill evaluate` that scores the models as they are; None if they are fine-tuned."""
    protocol: ProtocolName | None = None
    second_stage: bool = False
    """Whether students are fine-tuned by the second stage of their own recipe, from a fine-tuned teacher
    (KroneckerBERT); else on the labels alone."""
    average: bool = False
    """Whether the last figure of a row is the mean of the others."""
    axis: str | None = None
    """What the rows' numbers are: the label of the axis over which the report draws the scores; None without a plot."""


def table_files(key: str) -> list[str]:
    """Return the names of the files in suites/ that have a key: `methods` (a comparison) or `columns` (a table)."""
    files = (item for item in _SUITES.iterdir() if item.name.endswith(".yaml"))
    # --help lists these names, and parsing every file as YAML would make it slow.
    return sorted(item.name.removesuffix(".yaml") for item in files if f"\n{key}:" in item.read_text(encoding="utf-8"))


def read_table(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((_SUITES / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def table_names() -> list[str]:
    """Return the names of the tables, such as minilm-table2."""
    return table_files("columns")


def load_table(name: str) -> PublishedTable:
    """Load one of `table_names`."""
    content = read_table(name)
    columns = [Column(**fields) for fields in content["columns"]]
    # A figure of a paper may be a drawing without numbers.
    none = [None] * (len(columns) + content.get("average", False))
    rows = [
        TableRow(name=key, **{**fields, "published": tuple(fields.get("published", none))})
        for key, fields in content["rows"].items()
    ]
    parts = {"tasks": tuple(content["tasks"]), "columns": tuple(columns), "rows": tuple(rows)}
    return PublishedTable(name=name, **{**content, **parts})
