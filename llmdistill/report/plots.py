"""The plots of reports: scores and curves, and what all plots share.

Every method has the same color and marker in all plots. The same data always gives the same bytes.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
from matplotlib import rc_context, rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from llmdistill.report.score import Score
from llmdistill.report.tables import Spread

STYLE = rc_params_from_file(Path(__file__).with_name("plots.mplstyle"), use_default_template=False)

INK, PAPER, GRAY = STYLE["text.color"], STYLE["figure.facecolor"], STYLE["axes.edgecolor"]
"""Colors of text and axes, of the background, and of the rows that are not methods, such as the untrained student."""

COLORS = ("#1f78b4", "#d55e00", "#009e73", "#b5588f", "#c28a00", "#4aa8dc")
"""Okabe and Ito's colors for color-blind readers; the pale colors are darkened to be visible on white."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))

WIDTH = 4.6
"""The width of a figure in inches: on a telephone, 360 pixels wide, its text is still 9 pixels high."""


class Style(NamedTuple):
    color: str
    marker: str
    dashes: tuple[float, ...]
    fill: Literal["full", "none"] = "full"


class Curve(NamedTuple):
    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


class Panel(NamedTuple):
    """A picture of one model beside those of others."""

    title: str
    note: str
    """Text below the title."""
    values: np.ndarray


Dots = tuple[str, Style, Spread]
"""The label of a line of the plot of scores, its style, and the scores over seeds."""

Line = tuple[str, Style, list[tuple[int, float]]]
"""The label of a line of the plot of quality against size, its style, and the parameters and scores of its points."""


class Drawing(NamedTuple):
    name: str
    title: str
    caption: str
    figure: Figure


def method_styles(names: Sequence[str], plain: Sequence[str] = ()) -> dict[str, Style]:
    """Return a style for each method by its position in the list; the names in `plain` are gray and use no color."""
    styles = {name: Style(GRAY, "o", ()) for name in plain}
    for index, name in enumerate(name for name in names if name not in plain):
        # The numbers of markers and colors differ, so that a repeated color has another marker and dash.
        dashes = DASHES[index // len(COLORS) % len(DASHES)]
        styles[name] = Style(COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)], dashes)
    return styles


def mean_curve(histories: Sequence[Sequence[Mapping[str, float]]], key: str) -> Curve | None:
    """Return the mean, lowest and highest finite value of a key at each step; None if no row has one."""
    values: dict[float, list[float]] = {}
    for row in (row for history in histories for row in history):
        value = row.get(key)
        if value is not None and math.isfinite(value):
            values.setdefault(row["step"], []).append(value)
    return curve_of(values) if values else None


def curve_of(values: Mapping[float, Sequence[float]]) -> Curve:
    """Return the mean, lowest and highest of the values at each place of the x axis."""
    steps = sorted(values)
    return Curve(steps, *([choose(values[step]) for step in steps] for choose in (statistics.fmean, min, max)))


def is_line(curve: Curve | None) -> TypeGuard[Curve]:
    """Return whether there is a curve with at least two points: a single point shows no course."""
    return curve is not None and len(curve.steps) > 1


@rc_context(STYLE)
def plot_scores(dots: Sequence[Dots], teacher: float | None, score: Score, sets: Sequence[str]) -> Figure:
    """Plot the average score over sets of each student, with its standard deviation and seeds, and the teacher."""
    figure = new_figure(WIDTH, 0.9 + 0.36 * max(len(dots), 2))
    axes = figure.subplots()
    small: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
    for line, (_, style, (mean, std, values)) in enumerate(dots):
        axes.plot(values, [line] * len(values), "|", color=style.color, alpha=0.7, markersize=11)
        axes.errorbar(mean, line, xerr=std, color=style.color, marker=style.marker, capsize=3, markersize=5)
        axes.annotate(score.show(mean), (mean, line), (0, 7), **small)
    if teacher is not None:
        axes.axvline(teacher, color=INK, linewidth=1, dashes=(4, 3))
        text, place = f"teacher {score.show(teacher)}", ("data", "axes fraction")
        axes.annotate(text, (teacher, 1.0), (0, 3), xycoords=place, **small)
    axes.set_yticks(range(len(dots)), [label for label, _, _ in dots])
    axes.set_ylim(len(dots) - 0.5, -0.75)  # from the top down, with room for the note above the first
    axes.margins(x=0.08)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    scale_scores(axes, "x", [*(value for _, _, spread in dots for value in spread.values), teacher], score)
    axes.set_xlabel(score.label(sets))
    return figure


@rc_context(STYLE)
def plot_curves(curves: Sequence[tuple[str, Style, Curve]], ylabel: str) -> Figure:
    """Plot one line per method over the steps, with a band from the lowest to the highest seed."""
    figure = new_figure(WIDTH, 3.2)
    axes = figure.subplots()
    for label, style, curve in curves:
        draw_curve(axes, label, style, curve)
    scale_y(axes, [curve for _, _, curve in curves])
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    legend_below(figure, [curve.mean[-1] for _, _, curve in curves])
    return figure


def short_number(value: float) -> str:
    """Format a number in thousands, millions or billions, such as 1.5M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def save_plot(figure: Figure, folder: Path, name: str) -> str:
    """Write NAME.png and NAME.svg, and return the SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    # The salt makes the ids reproducible, and different between two plots in one page.
    with rc_context({**STYLE, "svg.hashsalt": name}):
        # Lay out once for both files: a constrained layout takes longer than the drawing.
        figure.draw_without_rendering()
        figure.set_layout_engine(None)
        # Without date and versions, so that the same data give the same bytes.
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        figure.savefig(folder / f"{name}.png", dpi=160, metadata={"Software": None})
    (folder / f"{name}.svg").write_text(text.getvalue(), encoding="utf-8")
    return text.getvalue()


def inline_svg(svg: str, label: str) -> str:
    """Return an SVG as an element of an HTML page, in its colors; `label` is for screen readers and escaped already."""
    svg = svg[svg.index("<svg") :]
    # The groups of all plots have the same ids, which must be unique in a page.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # In a dark page the text is light, and the plot follows it.
    svg = re.sub(rf"(fill|stroke): {INK}", r"\1: currentColor", svg)
    svg = re.sub(rf"(fill|stroke): {PAPER}", r"\1: none", svg)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    return re.sub(r"<svg [^>]*>", lambda _: f'<svg {box.group()} role="img" aria-label="{label}">', svg, count=1)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, with its size in inches; the caller must have the decorator `rc_context(STYLE)`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # without pyplot, which would keep every figure
    return figure


def frame_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(f"{panel.title}\n", loc="left", fontsize=9)
    axes.text(0, 1.02, panel.note, transform=axes.transAxes, fontsize=8, color=INK)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_alpha(0.5)


def draw_curve(axes: Axes, label: str, style: Style, curve: Curve, *, marker: bool = True) -> None:
    """Draw a line with the band of its runs, and a marker at each value if there are few."""
    few = len(curve.steps) < 25
    shown = style.marker if (marker and few) or len(curve.steps) == 1 else None
    look: dict[str, Any] = {"color": style.color, "dashes": style.dashes, "fillstyle": style.fill}
    axes.plot(curve.steps, curve.mean, linewidth=1.6, marker=shown, markersize=4, label=label, **look)
    axes.fill_between(curve.steps, curve.low, curve.high, color=style.color, alpha=0.18, linewidth=0)


def scale_y(axes: Axes, curves: Sequence[Curve], ticks: int = 6, *, log: bool = True) -> None:
    """Make the y axis logarithmic, if it may be, if all values are positive and span more than a factor of 10."""
    low, high = min(min(curve.low) for curve in curves), max(max(curve.high) for curve in curves)
    if not log or low <= 0 or high / low <= 10:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=ticks))
        return
    _set_log_scale(axes, "y", high / low)


def scale_scores(axes: Axes, which: Literal["x", "y"], scores: Sequence[float | None], score: Score) -> None:
    if score.over_decades:
        known = [value for value in scores if value is not None]
        _set_log_scale(axes, which, max(known) / min(known))


def _set_log_scale(axes: Axes, which: Literal["x", "y"], ratio: float) -> None:
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    # On the x axis the numbers stand side by side, so fewer fit.
    wide = LogLocator(subs=(1.0,) if ratio > 100 else (1.0, 3.0), numticks=6 if which == "x" else 12)
    axis.set_major_locator(wide if ratio > 10 else MaxNLocator(nbins=6))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def legend_columns(labels: Sequence[str]) -> int:
    """Return how many entries of a legend of small letters stand side by side in a figure."""
    # 60 letters stand in a line; the mark of an entry and its gaps take the room of 7.
    return max(1, min(len(labels), 60 // (max(map(len, labels), default=0) + 7)))


def legend_below(figure: Figure, heights: Sequence[float]) -> None:
    """Add a legend below, in the order of the lines' last values from the top."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    order = sorted(range(len(handles)), key=lambda index: -heights[index])
    ordered, names = [handles[index] for index in order], [labels[index] for index in order]
    figure.legend(ordered, names, loc="outside lower center", ncols=legend_columns(labels), fontsize=8)
