"""Draws the attention maps of several models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from llmdistill.report.plots import INK, STYLE, new_figure

_TOKEN = 0.135
"""Inches of a token on an axis, so that its text can be read."""
_SMALLEST = 2.3
"""Inches of the smallest panel, so that its note fits above it."""


class Panel(NamedTuple):
    """The attention of a head, or the mean of heads, of one model."""

    title: str
    note: str
    """Text below the title."""
    shares: np.ndarray
    """(T, T), the share of each key (second axis) in the attention of a query."""


@rc_context(STYLE)
def plot_attention(rows: Sequence[Sequence[Panel]], tokens: Sequence[str]) -> Figure:
    """Plot the panels of each row side by side, in one scale of colors a row, with the tokens on the axes.

    Args:
        rows: panels by row; all rows have equally many.
        tokens: the tokens of the text.
    """
    columns, side = len(rows[0]), max(_SMALLEST, _TOKEN * len(tokens))
    labels = 0.075 * max(map(len, tokens)) + 0.2
    figure = new_figure(columns * (side + 0.15) + labels + 0.7, len(rows) * (side + 0.55) + labels)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, panels in enumerate(rows):
        # Most of the attention goes to one or two tokens; by its root the rest can be seen beside them.
        scale = PowerNorm(0.5, vmin=0, vmax=max(float(panel.shares.max()) for panel in panels))
        for column, panel in enumerate(panels):
            axes = grid[line, column]
            image = axes.imshow(panel.shares, cmap="Blues", norm=scale, interpolation="none")
            _label(axes, panel, tokens, left=column == 0, below=line == len(rows) - 1)
        figure.colorbar(image, ax=grid[line].tolist(), label="share of the attention", shrink=0.8, aspect=24, pad=0.01)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure


def _label(axes: Axes, panel: Panel, tokens: Sequence[str], *, left: bool, below: bool) -> None:
    axes.set_title(f"{panel.title}\n", loc="left", fontsize=9)
    axes.text(0, 1.02, panel.note, transform=axes.transAxes, fontsize=8, color=INK)
    places = range(len(tokens))
    axes.set_xticks(places, tokens if below else [""] * len(tokens), rotation=90, fontsize=7)
    axes.set_yticks(places, tokens if left else [""] * len(tokens), fontsize=7)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_alpha(0.5)
