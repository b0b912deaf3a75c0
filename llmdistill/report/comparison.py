"""Writes the report of a comparison of methods: results.json, costs.json, report.md, report.html and the plots."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure
from rich.console import Console

from llmdistill.files import write_json
from llmdistill.report import plots
from llmdistill.report.pages import write_page
from llmdistill.report.results import (
    COSTS,
    TEACHER,
    UNTRAINED,
    Comparison,
    Row,
    Run,
    best_figures,
    describe_finding,
)
from llmdistill.report.spread import plus_minus
from llmdistill.report.tables import print_table

_CURVES = {
    "valid_loss": (
        "validation loss",
        "Loss on the validation set, mean over seeds; the band goes from the lowest to the highest seed.",
    ),
    "loss": (
        "training loss",
        "There is no validation loss. The training losses of two methods are different sums, "
        "so that their heights cannot be compared. The band goes from the lowest to the highest seed.",
    ),
}
"""The learning curves by column of the log, each with its label and caption; the first one with values is drawn."""


class Drawing(NamedTuple):
    """A plot of the report."""

    name: str
    title: str
    caption: str
    figure: Figure


def write_comparison(folder: Path, comparison: Comparison) -> dict[str, Any]:
    """Write results.json, costs.json, report.md, report.html and plots/ into a folder; returns the results.

    results.json contains no time, date or absolute path, so two equal comparisons give the same file.
    """
    results: dict[str, Any] = _without_prefix(_results(comparison), folder)
    write_json(folder / "results.json", results)
    write_json(folder / "costs.json", {row.name: _costs(row) for row in comparison.rows})
    context = _context(comparison, _draw(folder / "plots", comparison))
    for kind in ("html", "md"):
        write_page(folder / f"report.{kind}", f"comparison.{kind}.j2", **context)
    return results


def _results(comparison: Comparison) -> dict[str, Any]:
    methods = {row.name: _result(row, comparison.difference(row)) for row in comparison.rows}
    return {"methods": methods, "sets": list(comparison.sets), "warnings": list(comparison.warnings)}


def _result(row: Row, difference: float | None) -> dict[str, Any]:
    rouge_l: dict[str, Any] | None = None
    if row.average is not None:
        rouge_l = {**{name: each.to_dict() for name, each in row.by_set.items()}, "average": row.average.mean}
    return {
        "params": row.params,
        "rougeL": rouge_l,
        "average_std": None if row.average is None else row.average.std,
        "difference_to_teacher": difference,
        "seeds": [run.seed for run in row.ended],
        "settings": None if row.settings is None else dict(row.settings),
        "valid_rougeL": None if row.valid is None else row.valid.mean,
        "runs": [run.folder for run in row.ended],
        "failed": [{"seed": run.seed, "folder": run.folder, "error": run.reason} for run in row.failed],
    }


def _costs(row: Row) -> dict[str, Any]:
    sizes = {"params": row.params, "checkpoint_bytes": row.checkpoint_bytes}
    return {**sizes, **{key: row.cost(key) for key in COSTS}}


def _without_prefix(value: Any, folder: Path) -> Any:
    """Return the value with every path below the folder made relative to the folder."""
    if isinstance(value, str):
        return value.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
    if isinstance(value, dict):
        return {key: _without_prefix(item, folder) for key, item in value.items()}
    return [_without_prefix(item, folder) for item in value] if isinstance(value, list) else value


def _context(comparison: Comparison, drawn: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the variables of the templates."""
    rows = comparison.rows
    runs = [run for row in rows for run in (*row.runs, *row.trials)]
    failed = [run for run in runs if run.error is not None]
    failed += [run for row in rows for run in row.failed if run.error is None]
    failed_sizes = [run for row in comparison.sizes for run in row.failed]
    sizes = [row for row in comparison.sizes if row.ended]
    differences = {row.name: comparison.difference(row) for row in rows}
    trained = [differences[row.name] for row in rows if row.trained]
    return {
        "comparison": comparison,
        "finding": describe_finding(rows, comparison.sets),
        "best": best_figures(rows, comparison.sets),
        "differences": differences,
        "best_difference": max((round(each, 1) for each in trained if each is not None), default=None),
        "teacher_params": None if comparison.teacher is None else comparison.teacher.params,
        "plots": drawn,
        "labels": {row.name: row.label for row in rows},
        "failed": _once([*failed, *failed_sizes]),
        "sizes": sizes,
        "made": _once([*runs, *failed_sizes, *(row.ended[0] for row in sizes)]),
        "paper_sets": list(dict.fromkeys(name for row in (comparison.paper or {}).values() for name in row)),
    }


def _once(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without duplicates; the chosen grid point's first seed may be both a trial and a run."""
    return list({(run.folder, run.command, run.error): run for run in reversed(runs)}.values())[::-1]


def _draw(folder: Path, comparison: Comparison) -> list[dict[str, str]]:
    """Draw every plot that has data, and remove the plots of an earlier report that are not drawn again."""
    drawn = []
    for name, title, caption, made in _figures(comparison):
        svg = plots.inline_svg(plots.save_plot(made, folder, name), html.escape(title, quote=True))
        drawn.append({"name": name, "title": title, "caption": caption, "svg": Markup(svg)})
    kept = {item["name"] for item in drawn}
    for file in folder.glob("*.*") if folder.is_dir() else ():
        ours = file.stem in ("scores", "learning_curves", "size") or file.stem.startswith("terms_")
        if ours and file.suffix in (".png", ".svg") and file.stem not in kept:
            file.unlink()
    return drawn


def _figures(comparison: Comparison) -> list[Drawing]:
    """Return every plot."""
    rows, figures = comparison.rows, list[Drawing]()
    styles = plots.method_styles([row.name for row in rows], plain=(TEACHER, UNTRAINED))
    levels = {row.name: row.average.mean for row in rows if row.average is not None}
    dots = [
        plots.Dots(row.label, styles[row.name], row.average.mean, row.average.std, row.average.values)
        for row in rows
        if row.trained and row.average is not None
    ]
    if dots:
        # The untrained student scores far lower; on a common scale, differences between methods would not be visible.
        start = levels.get(UNTRAINED)
        left_out = "" if start is None else f" The untrained student, at {start:.1f}, is left out."
        caption = f"Mean over seeds, with its standard deviation; the small strokes are the seeds.{left_out}"
        figures.append(Drawing("scores", "Scores", caption, plots.plot_scores(dots, levels.get(TEACHER))))
    figures += _curve_figures(rows, styles)
    by_method: dict[str, list[tuple[int, float]]] = {}
    for row in comparison.sizes:
        if row.trained and row.params is not None and row.average is not None:
            by_method.setdefault(row.name, []).append((row.params, row.average.mean))
    if by_method:
        lines = [(row.label, styles[row.name], by_method[row.name]) for row in rows if row.name in by_method]
        caption = (
            "Students of several sizes, trained with the settings chosen for the main table; untrained ones left out."
        )
        made = plots.plot_size(lines, levels.get(TEACHER))
        figures.append(Drawing("size", "Quality against size", caption, made))
    return figures


def _curve_figures(rows: Sequence[Row], styles: Mapping[str, plots.Style]) -> list[Drawing]:
    """Return the plots of the learning curves, and of each method's loss terms if its loss has several terms."""
    figures = []
    for key, (label, caption) in _CURVES.items():
        found = [(row, plots.mean_curve([run.history for run in row.ended], key)) for row in rows]
        curves = [(row.label, styles[row.name], curve) for row, curve in found if curve is not None]
        if curves:
            made = plots.plot_curves(curves, label)
            figures.append(Drawing("learning_curves", "Learning curves", caption, made))
            break
    for row in rows:
        histories = [run.history for run in row.ended]
        terms = {term: curve for term in row.terms if (curve := plots.mean_curve(histories, term)) is not None}
        if len(row.terms) > 1 and terms:
            name = f"terms_{re.sub(r'[^A-Za-z0-9_.-]', '_', row.name)}"
            caption = (
                "Each term of the training loss, mean over seeds, with a band from the lowest to the highest seed."
            )
            made = plots.plot_terms(terms, styles[row.name])
            figures.append(Drawing(name, f"Terms of the loss: {row.label}", caption, made))
    return figures


def print_comparison(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the results.json of a comparison on the terminal, as mean ± standard deviation over seeds."""
    sets, rows = results["sets"], []
    for name, method in results["methods"].items():
        scores = method["rougeL"]
        if scores is None:
            rows.append([name, "", *("failed" for _ in sets), ""])
            continue
        cells = [plus_minus(scores[each]["mean"], scores[each]["std"]) for each in sets]
        rows.append([name, f"{method['params']:,}", *cells, plus_minus(scores["average"], method["average_std"])])
    terminal = console or Console()
    title = "ROUGE-L (0-100), mean ± standard deviation over seeds"
    print_table(title, ["method", "params", *sets, "average"], rows, console=terminal)
    for warning in results["warnings"]:
        terminal.print(f"WARNING: {warning}", style="bold yellow")
