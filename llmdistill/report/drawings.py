"""Draws the plots of a comparison's report and saves them."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from llmdistill.report import plots
from llmdistill.report.panels import plot_size, plot_sizes, plot_terms
from llmdistill.report.plots import Drawing
from llmdistill.report.results import TABLE_SIZE, TEACHER, UNTRAINED, Comparison, ComparisonRow
from llmdistill.report.score import PERPLEXITY, Score
from llmdistill.report.tables import Spread
from llmdistill.report.weighting import draw_predictions, draw_weighting

_CURVES = {
    "valid_loss": (
        "validation loss",
        "Loss on the validation set, mean over seeds; the band goes from the lowest to the highest seed.",
    ),
    "loss": (
        "training loss",
        "There is no curve of a validation loss. The training losses of two methods are different sums, "
        "so that their heights cannot be compared. The band goes from the lowest to the highest seed.",
    ),
}
"""The learning curves by column of the log, each with its label and caption; the first one with values is drawn."""
_TERMS_CAPTION = "Each term of the training loss, mean over seeds, with a band from the lowest to the highest seed."
_OWN_FILES = re.compile(r"scores|size|predicted|terms_.+|perplexity_.+|curves|(learning_curves|ranks|spectra)(_.+)?")
"""The names of the plots of a report."""


def save_drawings(folder: Path, drawings: Sequence[Drawing]) -> list[dict[str, str]]:
    """Save plots into a folder, remove those of an earlier report, and return the variables of the templates."""
    drawn = []
    for name, title, caption, figure in drawings:
        svg = plots.inline_svg(plots.save_plot(figure, folder, name), html.escape(title))
        # Markup, because the templates escape all other texts.
        drawn.append({"name": name, "title": title, "caption": caption, "svg": Markup(svg)})
    names = {item["name"] for item in drawn}
    for file in (*folder.glob("*.png"), *folder.glob("*.svg")):
        # The folder may hold plots of the user's, which stay.
        if _OWN_FILES.fullmatch(file.stem) and file.stem not in names:
            file.unlink()
    return drawn


def draw_comparison(comparison: Comparison) -> list[Drawing]:
    """Return every plot that has data."""
    rows, drawings = comparison.rows, list[Drawing]()
    styles = row_styles(rows)
    measures = [None, *comparison.texts]
    for text in measures:
        drawings += _draw_scores(comparison, styles, text)
    for start in dict.fromkeys(row.start for row in rows if row.trained):
        of_start = [row for row in rows if row.start == start]
        by_method = plots.method_styles([row.name for row in of_start], plain=(TEACHER, UNTRAINED))
        for key, (label, caption) in _CURVES.items():
            candidates = [
                (row, plots.mean_curve([row.logs.get(run.folder, []) for run in row.ended], key)) for row in of_start
            ]
            curves = [(row.label, by_method[row.name], curve) for row, curve in candidates if plots.is_line(curve)]
            if curves:
                if key == "valid_loss" and not comparison.score.compares_losses:
                    caption += " It is each method's own loss, so that the heights of two methods cannot be compared."
                figure = plots.plot_curves(curves, label)
                drawings.append(_name_by_start(Drawing("learning_curves", "Learning curves", caption, figure), start))
                break
    for row in rows:
        logs = [row.logs.get(run.folder, []) for run in row.ended]
        terms = {term: curve for term in row.terms if plots.is_line(curve := plots.mean_curve(logs, term))}
        if len(row.terms) > 1 and terms:
            name = f"terms_{re.sub(r'[^A-Za-z0-9_.-]', '_', row.key)}"
            figure = plot_terms(terms, styles[row.key])
            drawings.append(Drawing(name, f"Terms of the loss: {row.title}", _TERMS_CAPTION, figure))
    for text in measures:
        drawings += _draw_size(comparison, styles, text)
    predicted = draw_predictions([student.weighting for student in comparison.untrained])
    drawings += [] if predicted is None else [predicted]
    for student in comparison.untrained:
        if student.size == TABLE_SIZE:
            drawings += [_name_by_start(drawing, student.start) for drawing in draw_weighting(student.weighting)]
    return drawings


def _select_spread(row: ComparisonRow, text: str | None) -> Spread | None:
    """Return the average score of a row, or its perplexity on a text."""
    return row.average if text is None else row.by_text.get(text)


def _select_score(comparison: Comparison, text: str | None) -> tuple[Score, Sequence[str]]:
    """Return the score and the sets of the average, or of a text."""
    return (comparison.score, comparison.sets) if text is None else (PERPLEXITY, [text])


def _draw_scores(comparison: Comparison, styles: Mapping[str, plots.Style], text: str | None) -> list[Drawing]:
    """Return the plot of the average scores, or of the perplexity of a text, if a method has any."""
    spreads = {row.key: spread for row in comparison.rows if (spread := _select_spread(row, text)) is not None}
    if not any(row.trained and row.key in spreads for row in comparison.rows):
        return []
    shown = [row for row in comparison.rows if row.name != TEACHER and row.key in spreads]
    dots = [(row.title, styles[row.key], spreads[row.key]) for row in shown]
    several = any(len(scores.values) > 1 for _, _, scores in dots)
    of_seeds = "Mean over seeds, with its standard deviation; the small strokes are the seeds."
    caption = of_seeds if several else "One seed of each method: how much of a difference is chance is not known."
    teacher = spreads.get(TEACHER)
    figure = plots.plot_scores(dots, None if teacher is None else teacher.mean, *_select_score(comparison, text))
    if text is None:
        return [Drawing("scores", "Scores by method", caption, figure)]
    return [Drawing(f"perplexity_{text}", f"Perplexity of {text}", f"{caption} Lower is better.", figure)]


def row_styles(rows: Sequence[ComparisonRow]) -> dict[str, plots.Style]:
    """Return a style by the key of each row; its color says the method, and its marker the start."""
    methods = plots.method_styles(list(dict.fromkeys(row.name for row in rows)), plain=(TEACHER, UNTRAINED))
    starts = list(dict.fromkeys(row.start for row in rows if row.start))
    styles = {row.key: methods[row.name] for row in rows}
    for row in rows:
        if row.start:
            marker = plots.MARKERS[starts.index(row.start) % len(plots.MARKERS)]
            styles[row.key] = methods[row.name]._replace(marker=marker)
    return styles


def _name_by_start(drawing: Drawing, start: str) -> Drawing:
    """Return the plot of one start under its name, in a comparison of starts."""
    if not start:
        return drawing
    return drawing._replace(name=f"{drawing.name}_{start}", title=f"{drawing.title}: from {start}")


def _draw_size(comparison: Comparison, styles: Mapping[str, plots.Style], text: str | None) -> list[Drawing]:
    """Return the plot of quality against size, by average score or perplexity; with starts every method has a panel."""
    of_teacher = None if comparison.teacher is None else _select_spread(comparison.teacher, text)
    teacher = None if of_teacher is None else of_teacher.mean
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in comparison.sizes:
        spread = _select_spread(row, text)
        if row.params is not None and spread is not None:
            lines.setdefault(row.key, []).append((row.params, spread.mean))
    drawn = [row for row in comparison.rows if row.key in lines]
    name, title = "size", "Quality against size"
    if text is not None:
        name, title = f"perplexity_size_{text}", f"Perplexity of {text} against size"
    caption = "Students of several sizes, trained with the settings chosen for the main table"
    measured = _select_score(comparison, text)
    if any(row.start for row in drawn):
        starts = plots.method_styles(list(dict.fromkeys(row.start for row in drawn)))
        panels: dict[str, list[plots.Line]] = {}
        for row in drawn:
            panels.setdefault(row.label, []).append((row.start, starts[row.start], lines[row.key]))
        return [Drawing(name, title, f"{caption}; a line is a start.", plot_sizes(panels, teacher, *measured))]
    points = [(row.title, styles[row.key], lines[row.key]) for row in drawn]
    figures = [plot_size(points, teacher, *measured)] if any(row.trained for row in drawn) else []
    return [Drawing(name, title, f"{caption}.", figure) for figure in figures]
