"""Plots points in a plane, one panel per model, coloured by class or score (KroneckerBERT Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llmdistill.report.plots import COLORS, INK, MARKERS, STYLE, new_figure

_COLUMNS = 4
"""Maximum number of panels side by side."""


class Cloud(NamedTuple):
    """One panel."""

    title: str
    note: str
    """Text below the title."""
    points: np.ndarray
    """(rows, 2)."""


def plot_clusters(clouds: Sequence[Cloud], targets: np.ndarray, classes: Sequence[str]) -> Figure:
    """Plot the clouds side by side.

    Args:
        clouds: one cloud per model, all of the same examples.
        targets: (rows,), the class or the score of each example.
        classes: the names of the classes; empty if targets are scores, which are shown by a colour scale.
    """
    with rc_context(STYLE):
        columns = min(len(clouds), _COLUMNS)
        lines = -(-len(clouds) // columns)
        figure = new_figure(2.9 * columns + 0.4, 3.0 * lines + 0.4)
        panels = list(np.atleast_1d(figure.subplots(lines, columns)).flat)
        for axes, cloud in zip(panels, clouds, strict=False):
            _draw(axes, cloud, targets, classes)
        for axes in panels[len(clouds) :]:
            axes.set_visible(False)
        if classes:
            # A bare number would be unclear in the legend.
            names = [f"class {name}" if name.isdigit() else name for name in classes]
            handles, _ = panels[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 4), markerscale=2)
        else:
            figure.colorbar(panels[0].collections[0], ax=panels, label="score", shrink=0.7, aspect=24, pad=0.02)
        return figure


def _draw(axes: Axes, cloud: Cloud, targets: np.ndarray, classes: Sequence[str]) -> None:
    small: dict[str, Any] = {"s": max(4.0, min(20.0, 6000 / len(targets))), "alpha": 0.75, "linewidths": 0}
    if classes:
        for index, name in enumerate(classes):
            x, y = cloud.points[targets == index].T
            marker = MARKERS[index % len(MARKERS)]
            axes.scatter(x, y, color=COLORS[index % len(COLORS)], marker=marker, label=name, **small)
    else:
        x, y = cloud.points.T
        axes.scatter(x, y, c=targets, cmap="viridis", **small)
    axes.set_title(f"{cloud.title}\n", loc="left", fontsize=9)
    axes.text(0, 1.02, cloud.note, transform=axes.transAxes, fontsize=8, color=INK)
    # The axes of t-SNE and its distances between far points have no meaning, so there are no ticks.
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_box_aspect(1)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_alpha(0.5)
