"""A published table beside our own figures: on the terminal, as report.md, report.html and results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.text import Text

from llmdistill.report.pages import signed
from llmdistill.report.panels import plot_panels
from llmdistill.report.paper import PublishedTable, TableRow
from llmdistill.report.plots import DASHES, Curve, Drawing, Style, curve_of, method_styles
from llmdistill.report.study_report import StudyReport
from llmdistill.report.tables import Spread, TitledTable, show_seeds, spread

AVERAGE, TEACHER = "average", "teacher"
"""The head of the column of the mean over the others, and the key of the teacher's row."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    folder: str
    model: str = ""
    scores: Mapping[tuple[str, str], Sequence[float]] = field(default_factory=dict)
    """The scores x 100 over seeds by (column, metric)."""
    params: int | None = None
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The chosen settings of fine-tuning by task."""
    warnings: Sequence[str] = ()
    seconds: float = 0.0
    """The duration of the distillation."""
    tuning_seconds: float = 0.0
    """The duration of the fine-tuning, with all settings that were tried."""
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedReport:
    table: PublishedTable
    measured: Mapping[str, Measured]
    facts: Mapping[str, str]
    """Command, hardware, versions, protocol and data, by the names that the report shows."""

    def cells(self, row: TableRow) -> list[Spread | None]:
        """Return our score in each column, and their mean over columns if all columns have scores."""
        columns, measured = self.table.columns, self.measured.get(row.name)
        if measured is None or measured.error is not None:
            return [None] * (len(columns) + self.table.average)
        scores = [measured.scores.get((column.column, column.metric)) for column in columns]
        cells = [None if values is None else spread(values) for values in scores]
        if not self.table.average:
            return cells
        # Tasks may differ in their numbers of seeds, so that only means can be averaged.
        means = [cell.mean for cell in cells if cell is not None]
        return [*cells, spread([fmean(means)]) if len(means) == len(columns) else None]

    @property
    def fine_tuned(self) -> bool:
        """Whether the models were fine-tuned on the tasks of the columns; else they were scored as they are."""
        return self.table.suite is None

    @property
    def explanation(self) -> str:
        seeds = "the seeds of the fine-tuning" if self.fine_tuned else "seeds"
        choice = " The learning rate and the epochs of each task were chosen on the same dev sets, as in the papers."
        return f"Ours, x 100, mean ± sample standard deviation over {seeds}.{choice if self.fine_tuned else ''}"

    @property
    def note(self) -> str:
        """Which of the paper's figures are of other examples than ours; "" if none are."""
        on_server = [column.label for column in self.table.columns if column.on_server]
        if not on_server:
            return ""
        return f"The paper's figures for {', '.join(on_server)} are of GLUE's test sets, ours of the dev sets."

    @property
    def header(self) -> list[str]:
        return [*(column.label for column in self.table.columns), *([AVERAGE] if self.table.average else [])]


def published_report(folder: Path, report: PublishedReport) -> StudyReport:
    """Return the report of a table, in a folder: results.json, report.md, report.html and plots/.

    The terminal shows the rows that were run, each score with the published one in brackets.
    """
    rows, lines = [], []
    for row in report.table.rows:
        measured, entry = report.measured.get(row.name), None
        if measured is not None:
            values = asdict(measured)
            del values["scores"]
            entry = {**values, "figures": [None if cell is None else cell.to_dict() for cell in report.cells(row)]}
        own = {"key": row.name, "label": row.label, **({} if row.at is None else {"at": row.at})}
        rows.append({**own, "published": list(row.published), "measured": entry})
        lines.append({"label": row.label, "why_not": row.missing, "measured": measured, "cells": _shown(row, report)})
    results = {"title": report.table.title, "columns": report.header, "rows": rows, "facts": dict(report.facts)}
    run, table = [row for row in report.table.rows if row.name in report.measured], report.table
    shown = []
    for row in run:
        texts = [f"{text} ({figure})" if figure else text for text, figure in _shown(row, report).values()]
        shown.append([row.label, *texts])
    errors = {row.label: report.measured[row.name].error for row in run}
    return StudyReport(
        folder=folder,
        results=results,
        template="published",
        kinds=("html", "md"),
        values={"report": report, "lines": lines},
        drawings=draw_rows(report),
        table=TitledTable(f"{table.title}; in brackets the paper's", ["", *_shown(table.rows[0], report)], shown),
        transposed=True,
        notes=[Text(f"{label} FAILED: {error}") for label, error in errors.items() if error is not None],
        closing=f"The report is {folder / 'report.html'}, also report.md and results.json beside it.",
        failed=any(error is not None for error in errors.values()),
    )


def draw_rows(report: PublishedReport) -> list[Drawing]:
    """Return the plot of the scores over the numbers of the rows, a panel for each column with figures, if any."""
    lines: dict[str, list[tuple[float, TableRow]]] = {}
    for row in report.table.rows:
        if row.at is not None:
            lines.setdefault(row.line, []).append((row.at, row))
    styles, panels = method_styles(list(lines)), dict[str, list[tuple[str, Style, Curve]]]()
    for index, title in enumerate(report.header):
        for name, rows in lines.items():
            ours = {at: cell.values for at, row in rows if (cell := report.cells(row)[index]) is not None}
            paper = {at: [figure] for at, row in rows if (figure := row.published[index]) is not None}
            hollow = styles[name]._replace(dashes=DASHES[1], fill="none")
            for who, style, points in (("ours", styles[name], ours), ("paper", hollow, paper)):
                if points:
                    label = f"{name}, {who}" if name else who
                    panels.setdefault(title, []).append((label, style, curve_of(points)))
    if report.table.axis is None or not panels:
        return []
    caption = "Mean over seeds, with a band from the lowest to the highest seed. Hollow, dashed: the paper's figures."
    made = plot_panels(panels, report.table.axis, scores=True)
    return [Drawing("scores", f"Scores by {report.table.axis}", caption, made)]


def _shown(row: TableRow, report: PublishedReport) -> dict[str, tuple[str, str]]:
    """Return by column the texts of our score and of the paper's figure, first those of the average, "" for none."""
    cells = report.cells(row)
    # As the papers print them, whose tables have one decimal or more.
    figures = ["" if figure is None else max(f"{figure:.1f}", f"{figure:g}", key=len) for figure in row.published]
    texts = ["–" if cell is None else show_seeds(cell.to_dict()) for cell in cells]
    shown = dict(zip(report.header, zip(texts, figures, strict=True), strict=True))
    if not report.table.average:
        return shown
    first = {AVERAGE: shown.pop(AVERAGE)}
    teacher = next((other for other in report.table.rows if other.name == TEACHER), None)
    if teacher is not None:
        means = [None if cell is None else cell.mean for cell in (cells[-1], report.cells(teacher)[-1])]
        paper = _distance(row.published[-1], teacher.published[-1])
        distances = signed(_distance(*means)), "" if paper is None else signed(paper)
        first["to teacher"] = ("–", "") if row is teacher else distances
    return first | shown


def _distance(score: float | None, teacher: float | None) -> float | None:
    return None if score is None or teacher is None else score - teacher
