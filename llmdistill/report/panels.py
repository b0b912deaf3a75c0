"""Plots of quality against size, and of several panels: the terms of a loss, the columns of a table, many starts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from llmdistill.report import plots
from llmdistill.report.plots import Curve, Line, Style, scale_scores
from llmdistill.report.score import Score


def panel_grid(titles: Collection[str], edges: float, line: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel for each title, two side by side; it is `edges` and `line` inches a line high."""
    columns = min(2, len(titles))
    lines = math.ceil(len(titles) / columns)
    figure = plots.new_figure(plots.WIDTH, edges + line * lines)
    grid = list(figure.subplots(lines, columns, squeeze=False, **shared).flat)
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(title, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(titles) - columns) : len(titles)]:
        # A panel above an empty cell is the last of its column and has tick labels too.
        axes.tick_params(labelbottom=True)
    return figure, grid[: len(titles)]


@rc_context(plots.STYLE)
def plot_size(
    points: Sequence[Line], teacher: float | None, score: Score, sets: Sequence[str], size: str = "parameters"
) -> Figure:
    """Plot the average score over sets against a model's size: a line for a method, a dashed one for the teacher."""
    figure = plots.new_figure(plots.WIDTH, 3.2)
    axes = figure.subplots()
    _draw_sizes(axes, points, teacher, bins=5)
    axes.set_xlabel(size)
    scale_scores(axes, "y", [*_list_scores(points), teacher], score)
    axes.set_ylabel(score.label(sets))
    last = [sorted(pairs)[-1][1] for _, _, pairs in points]
    plots.legend_below(figure, [*last, teacher] if teacher is not None else last)
    return figure


@rc_context(plots.STYLE)
def plot_sizes(
    panels: Mapping[str, Sequence[Line]], teacher: float | None, score: Score, sets: Sequence[str]
) -> Figure:
    """Plot the average score over sets against the number of parameters: a panel for a method, a line for a start."""
    figure, grid = panel_grid(panels, 1.1, 1.7, sharex=True, sharey=True)
    for axes, points in zip(grid, panels.values(), strict=True):
        _draw_sizes(axes, points, teacher, bins=4, markersize=4)
    figure.supxlabel("parameters", fontsize=9)
    scores = [value for points in panels.values() for value in _list_scores(points)]
    scale_scores(grid[0], "y", [*scores, teacher], score)  # sharey: the other panels follow
    figure.supylabel(score.label(sets), fontsize=9)
    _legend_above(figure, *grid[0].get_legend_handles_labels())
    return figure


def plot_terms(terms: Mapping[str, Curve], style: Style) -> Figure:
    return plot_panels({name: [(name, style, curve)] for name, curve in terms.items()}, "step")


@rc_context(plots.STYLE)
def plot_panels(
    panels: Mapping[str, Sequence[tuple[str, Style, Curve]]], xlabel: str, *, scores: bool = False
) -> Figure:
    """Plot curves in panels, by their titles; scores have a linear scale and a marker at each value, unlike losses."""
    named = scores and max(map(len, panels.values())) > 1
    alone = scores and len(panels) == 1
    figure, grid = panel_grid(panels, 0.3 + 0.35 * named, 3.0 if alone else 1.9 if scores else 1.55, sharex=True)
    for axes, curves in zip(grid, panels.values(), strict=True):
        for label, style, curve in curves:
            plots.draw_curve(axes, label, style, curve, marker=scores)
        plots.scale_y(axes, [curve for _, _, curve in curves], ticks=4, log=not scores)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if alone else 4, integer=True, steps=[1, 2, 5, 10]))
    figure.supxlabel(xlabel, fontsize=9)
    if named:
        handles = {
            label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        _legend_above(figure, list(handles.values()), list(handles))
    return figure


def _legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend above the panels, where it does not cover the label of the x axis."""
    figure.legend(handles, labels, loc="outside upper right", ncols=plots.legend_columns(labels), fontsize=8)


def _draw_sizes(axes: Axes, lines: Sequence[Line], teacher: float | None, *, bins: int, **look: Any) -> None:
    for label, style, pairs in lines:
        params, averages = zip(*sorted(pairs), strict=True)
        axes.plot(params, averages, color=style.color, marker=style.marker, dashes=style.dashes, label=label, **look)
    if teacher is not None:
        axes.axhline(teacher, color=plots.INK, linewidth=1, dashes=(4, 3), label="teacher")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=bins))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plots.short_number(value)))


def _list_scores(lines: Sequence[Line]) -> list[float]:
    return [value for _, _, pairs in lines for _, value in pairs]
