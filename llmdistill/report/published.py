"""A published table beside our own figures: on the terminal, as report.md, report.html and results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from llmdistill.files import write_json
from llmdistill.report.column import Column
from llmdistill.report.drawings import save_drawings
from llmdistill.report.pages import signed, write_page
from llmdistill.report.panels import plot_panels
from llmdistill.report.plots import DASHES, Curve, Drawing, Style, method_styles
from llmdistill.report.spread import Spread, plus_minus, spread
from llmdistill.report.tables import print_table

AVERAGE, TEACHER = "average", "teacher"
"""The head of the column of the mean over the others, and the key of the teacher's row."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a row scored here."""

    folder: str
    """The folder of its results."""
    model: str = ""
    """The folder or hub name of the model that was fine-tuned."""
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
    """The reason of a failure, in one line."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of a table: the published figures, and ours where it was run."""

    key: str
    label: str
    published: Sequence[float | None]
    """The paper's figure in each column; with an average, this is the last one."""
    why_not: str | None = None
    """The reason why the row is not run; None if it was, or was not asked for."""
    measured: Measured | None = None
    at: float | None = None
    """The row's number on the axis of the plot; None if it is in no plot."""
    line: str = ""
    """The name of the line of the plot that the row belongs to."""

    def cells(self, columns: Sequence[Column], *, average: bool) -> list[Spread | None]:
        """Return our score in each column, and their mean over columns if all columns have scores."""
        if self.measured is None or self.measured.error is not None:
            return [None] * (len(columns) + average)
        found = [self.measured.scores.get((each.column, each.metric)) for each in columns]
        cells = [None if values is None else spread(values) for values in found]
        if not average:
            return cells
        # Tasks may differ in their numbers of seeds, so that only means can be averaged.
        means = [cell.mean for cell in cells if cell is not None]
        return [*cells, spread([fmean(means)]) if len(means) == len(columns) else None]


@dataclass(frozen=True, kw_only=True)
class PublishedReport:
    """All data of a report."""

    title: str
    columns: Sequence[Column]
    average: bool
    """Whether the last figure is the mean over the columns."""
    lines: Sequence[Line]
    axis: str | None = None
    """The label of the axis of the rows' numbers, over which the scores are drawn; None without a plot."""
    facts: Mapping[str, str]
    """Command, hardware, versions, protocol and data, by the names that the report shows."""
    fine_tuned: bool = True
    """Whether the models were fine-tuned on the tasks of the columns; else they were scored as they are."""

    @property
    def explanation(self) -> str:
        """What our figures are."""
        seeds = "the seeds of the fine-tuning" if self.fine_tuned else "seeds"
        choice = " The learning rate and the epochs of each task were chosen on the same dev sets, as in the papers."
        return f"Ours, x 100, mean ± sample standard deviation over {seeds}.{choice if self.fine_tuned else ''}"

    @property
    def note(self) -> str:
        """Which of the paper's figures are of other examples than ours; "" if none are."""
        on_server = [each.label for each in self.columns if each.on_server]
        if not on_server:
            return ""
        return f"The paper's figures for {', '.join(on_server)} are of GLUE's test sets, ours of the dev sets."

    @property
    def header(self) -> list[str]:
        """The texts above the figures."""
        return [*(each.label for each in self.columns), *([AVERAGE] if self.average else [])]


def write_published(folder: Path, report: PublishedReport) -> dict[str, Any]:
    """Write results.json, report.md and report.html into a folder, and return the content of results.json."""
    rows = []
    for line in report.lines:
        cells = line.cells(report.columns, average=report.average)
        measured = None
        if line.measured is not None:
            values = asdict(line.measured)
            del values["scores"]
            figures = [None if cell is None else cell.to_dict() for cell in cells]
            measured = {**values, "figures": figures}
        place = {} if line.at is None else {"at": line.at}
        own = {"key": line.key, "label": line.label, **place}
        rows.append({**own, "published": list(line.published), "measured": measured})
    results = {"title": report.title, "columns": report.header, "rows": rows, "facts": dict(report.facts)}
    write_json(folder / "results.json", results)
    plots = save_drawings(folder / "plots", draw_rows(report))
    for kind in ("html", "md"):
        write_page(
            folder / f"report.{kind}",
            f"published.{kind}.j2",
            report=report,
            table=[(line, _shown(line, report)) for line in report.lines],
            heads=list(_shown(report.lines[0], report)),
            failed=_failed(report),
            plots=plots,
            folder=folder,
        )
    return results


def draw_rows(report: PublishedReport) -> list[Drawing]:
    """Return the plot of the scores over the numbers of the rows, a panel for each column with figures, if any."""
    lines: dict[str, list[Line]] = {}
    for row in report.lines:
        if row.at is not None:
            lines.setdefault(row.line, []).append(row)
    styles, panels = method_styles(list(lines)), dict[str, list[tuple[str, Style, Curve]]]()
    for index, title in enumerate(report.header):
        for name, rows in lines.items():
            ours, paper = list[tuple[float, Spread]](), list[tuple[float, Spread]]()
            for row in rows:
                cell, figure = row.cells(report.columns, average=report.average)[index], row.published[index]
                assert row.at is not None
                ours += [] if cell is None else [(row.at, cell)]
                paper += [] if figure is None else [(row.at, spread([figure]))]
            hollow = styles[name]._replace(dashes=DASHES[1], fill="none")
            for who, style, points in (("ours", styles[name], ours), ("paper", hollow, paper)):
                if points:
                    label = f"{name}, {who}" if name else who
                    panels.setdefault(title, []).append((label, style, _curve(points)))
    if report.axis is None or not panels:
        return []
    caption = "Mean over seeds, with a band from the lowest to the highest seed. Hollow, dashed: the paper's figures."
    made = plot_panels(panels, report.axis, scores=True)
    return [Drawing("scores", f"Scores by {report.axis}", caption, made)]


def _curve(points: Sequence[tuple[float, Spread]]) -> Curve:
    places, cells = zip(*sorted(points, key=lambda point: point[0]), strict=True)
    low, high = ([choose(cell.values) for cell in cells] for choose in (min, max))
    return Curve(list(places), [cell.mean for cell in cells], low, high)


def _shown(line: Line, report: PublishedReport) -> dict[str, tuple[str, str]]:
    """Return by the heads of the columns the texts of our score and of the paper's figure, "" where it has none.

    The average and its distance to the teacher's, which say the most, come first.
    """
    cells = line.cells(report.columns, average=report.average)
    figures = ["" if each is None else max(f"{each:.1f}", f"{each:g}", key=len) for each in line.published]
    shown = dict(zip(report.header, zip(map(_text, cells), figures, strict=True), strict=True))
    if not report.average:
        return shown
    first = {AVERAGE: shown.pop(AVERAGE)}
    teacher = next((each for each in report.lines if each.key == TEACHER), None)
    if teacher is not None:
        ours = teacher.cells(report.columns, average=True)[-1]
        means = [None if cell is None else cell.mean for cell in (cells[-1], ours)]
        paper = _distance(line.published[-1], teacher.published[-1])
        texts = signed(_distance(*means)), "" if paper is None else signed(paper)
        first["to teacher"] = ("–", "") if line is teacher else texts
    return first | shown


def _distance(score: float | None, teacher: float | None) -> float | None:
    return None if score is None or teacher is None else score - teacher


def _text(cell: Spread | None) -> str:
    """Format a score, with its standard deviation if there are several seeds."""
    if cell is None:
        return "–"
    return plus_minus(cell.mean, cell.std)


def _failed(report: PublishedReport) -> list[Line]:
    return [line for line in report.lines if line.measured is not None and line.measured.error is not None]


def print_published(report: PublishedReport, console: Console | None = None) -> None:
    """Print the rows that were run, each score with the published one in brackets."""
    rows = []
    for line in report.lines:
        if line.measured is None:
            continue
        texts = [f"{text} ({figure})" if figure else text for text, figure in _shown(line, report).values()]
        rows.append([line.label, *texts])
    print_table(
        f"{report.title}; in brackets the paper's",
        ["", *_shown(report.lines[0], report)],
        rows,
        turned=True,
        console=console,
    )
    for line in _failed(report):
        assert line.measured is not None
        (console or Console()).print(f"{line.label} FAILED: {line.measured.error}", highlight=False)
