"""Plots of several panels: the terms of a loss over the steps, the columns of a table over the numbers of its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from llmdistill.report.plots import STYLE, WIDTH, Curve, Style, draw_curve, legend_columns, new_figure, scale_y


def plot_terms(terms: Mapping[str, Curve], style: Style) -> Figure:
    """Plot the terms of one method's loss, one panel per term."""
    return plot_panels({name: [(name, style, curve)] for name, curve in terms.items()}, "step")


@rc_context(STYLE)
def plot_panels(
    panels: Mapping[str, Sequence[tuple[str, Style, Curve]]], xlabel: str, *, scores: bool = False
) -> Figure:
    """Plot curves in panels, by their titles; scores have a linear scale and a marker at each value, unlike losses."""
    columns = min(2, len(panels))
    lines = math.ceil(len(panels) / columns)
    named = scores and max(map(len, panels.values())) > 1
    alone = scores and len(panels) == 1
    figure = new_figure(WIDTH, 0.3 + (3.0 if alone else 1.9 if scores else 1.55) * lines + 0.35 * named)
    grid = list(figure.subplots(lines, columns, squeeze=False, sharex=True).flat)
    for axes, (title, curves) in zip(grid, panels.items(), strict=False):
        for label, style, curve in curves:
            draw_curve(axes, label, style, curve, marker=scores)
        scale_y(axes, [curve for _, _, curve in curves], ticks=4, log=not scores)
        axes.set_title(title, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if alone else 4, integer=True, steps=[1, 2, 5, 10]))
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[max(0, len(panels) - columns) : len(panels)]:
        # A panel above an empty cell is the last of its column and has tick labels too.
        axes.tick_params(labelbottom=True)
    figure.supxlabel(xlabel, fontsize=9)
    if named:
        handles = {
            label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            handles.values(), handles, loc="outside upper right", ncols=legend_columns(list(handles)), fontsize=8
        )
    return figure
