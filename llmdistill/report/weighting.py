"""Plots what a weighted factorization measured (weighting.json)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from llmdistill.artifacts import read_record
from llmdistill.config.student import FactorForm
from llmdistill.report.panels import panel_grid
from llmdistill.report.plots import INK, STYLE, WIDTH, Drawing, new_figure
from llmdistill.students.svd import factor_params

WEIGHTING_FILE = "weighting.json"
"""The file of a run's folder with the ranks, spectra and predicted losses of its student."""

_LIGHT, _DARK = "#fdfdfd", "#101010"
"""Colors of marks on fields, which stay as they are in pages of other colors."""
_DEPTHS = colormaps["viridis"]
_MAX_WRITTEN = 12
"""Largest number of layers at which the ranks are written into their fields."""


class Matrix(NamedTuple):
    layer: int
    """Counted from 1."""
    kind: str
    shape: tuple[int, int] | None
    """Outputs and inputs; None if it was not decomposed."""
    rank: int | None
    """None for a matrix that stays dense."""
    form: FactorForm
    losses: list[tuple[int, float]]
    """Pairs of a rank and the predicted loss of cutting this matrix alone to it."""

    @property
    def share(self) -> float:
        """The share of the matrix' parameters that its factors have."""
        if self.rank is None or self.shape is None:
            return 1.0
        m, n = self.shape
        return factor_params(m, n, self.rank, self.form) / (m * n)


def read_weighting(folder: Path) -> dict[str, Any]:
    """Return the content of weighting.json in a run's folder; empty if there is none."""
    record = read_record(folder / WEIGHTING_FILE, remedy="remove the run's folder, and it is made again")
    return {} if record is None else dict(record)


def read_matrices(weighting: Mapping[str, Any]) -> list[Matrix]:
    """Return the matrices of a weighted student by layer; none if they are not in numbered layers."""
    ranks, spectra = weighting.get("ranks", {}), weighting.get("spectra", {})
    places = {name: re.fullmatch(r"(?:.*?\.)?(\d+)\.(.+)", name) for name in spectra or ranks}
    kinds = {place[2] for place in places.values() if place is not None}
    lasts = [kind.rsplit(".", 1)[-1] for kind in kinds]
    # A kind is shown by the last part of its name, unless another kind ends with the same.
    short = {kind: last if lasts.count(last) == 1 else kind for kind, last in zip(kinds, lasts, strict=True)}
    decomposed = []
    for name, place in places.items():
        if place is not None:
            measured = spectra.get(name, {})
            shape = tuple(measured["shape"]) if measured else None
            losses = [(int(rank), float(loss)) for rank, loss in measured.get("costs", [])]
            layer, form = int(place[1]) + 1, weighting.get("form", "plain")
            decomposed.append(Matrix(layer, short[place[2]], shape, ranks.get(name), form, losses))
    return decomposed


def draw_weighting(weighting: Mapping[str, Any]) -> list[Drawing]:
    """Draw the ranks of a weighted student if they differ, and the spectra if they are in the unit of the loss."""
    decomposed = read_matrices(weighting)
    drawings = []
    if len({matrix.rank for matrix in decomposed if matrix.rank is not None}) > 1:
        caption = (
            "The rank of each matrix; the darker, the larger the share of its parameters that is kept. A cross marks a "
            "matrix that stays dense."
        )
        drawings.append(Drawing("ranks", "Ranks by layer and kind of matrix", caption, plot_ranks(decomposed)))
    if weighting.get("weighting") == "gradients" and any(matrix.losses for matrix in decomposed):
        caption = (
            "The loss that each singular value is predicted to save: its square in the unit of the loss, which is the "
            "same for all matrices. A line is a layer; the dot is the rank that the student takes."
        )
        drawings.append(
            Drawing("spectra", "Singular values in the unit of the loss", caption, plot_spectra(decomposed))
        )
    return drawings


def draw_predictions(weightings: Sequence[Mapping[str, Any]]) -> Drawing | None:
    """Return the plot of predicted against measured losses of several students; None for fewer than three of them."""
    points = [
        # The student has the ranks with the smallest divergence.
        (weighting["predicted_loss"], min(weighting["held_out"].values()))
        for weighting in weightings
        if weighting.get("weighting") == "gradients" and weighting.get("held_out")
    ]
    points = [point for point in points if min(point) > 0]  # their logarithms are taken
    if len(points) < 3:  # two points always lie on a line
        return None
    # In logarithms, because the losses of students of several sizes span orders of magnitude.
    correlation = float(np.corrcoef(np.log(points).T)[0, 1])
    caption = (
        "Each untrained student's predicted loss and its divergence from the teacher on held-out data, in nats per "
        f"token. Their logarithms correlate by {correlation:.4f}. The dashed line is where both are equal."
    )
    return Drawing("predicted", "Predicted and measured loss", caption, plot_predictions(points))


@rc_context(STYLE)
def plot_predictions(points: Sequence[tuple[float, float]]) -> Figure:
    figure = new_figure(WIDTH, 3.6)
    axes = figure.subplots()
    ends = [min(map(min, points)), max(map(max, points))]
    axes.plot(ends, ends, color=INK, linewidth=1, dashes=(4, 3))
    axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4)
    axes.set(xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("predicted loss, nats per token")
    axes.set_ylabel("measured divergence, nats per token")
    return figure


@rc_context(STYLE)
def plot_ranks(decomposed: Sequence[Matrix]) -> Figure:
    """Plot the ranks by layer and kind of matrix, darker for a larger share of the matrix' parameters."""
    kinds = list(dict.fromkeys(matrix.kind for matrix in decomposed))
    layers = sorted({matrix.layer for matrix in decomposed})
    columns = range(len(layers))
    figure = new_figure(WIDTH, 0.8 + 0.3 * len(kinds))
    axes = figure.subplots()
    shares = np.full((len(kinds), len(layers)), np.nan)
    dense = []
    for matrix in decomposed:
        line, column = kinds.index(matrix.kind), layers.index(matrix.layer)
        shares[line, column] = matrix.share
        if matrix.rank is None:
            dense.append((column, line))
        elif len(layers) <= _MAX_WRITTEN:
            color = _LIGHT if matrix.share > 0.6 else _DARK
            axes.text(column, line, str(matrix.rank), ha="center", va="center", fontsize=8, color=color)
    axes.pcolormesh(columns, range(len(kinds)), shares, cmap="Blues", vmin=-0.1, vmax=1.1)
    if dense:
        axes.plot(*zip(*dense, strict=True), "x", color=_LIGHT, markersize=min(6, 160 / len(layers)))
    axes.invert_yaxis()
    axes.set_yticks(range(len(kinds)), kinds)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=_MAX_WRITTEN, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: str(layers[int(place)]) if place in columns else ""))
    axes.set_xlabel("layer")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


@rc_context(STYLE)
def plot_spectra(decomposed: Sequence[Matrix]) -> Figure:
    """Plot the loss that each singular value saves: a panel for a kind, a line for a layer, and a dot at its rank."""
    kinds = list(dict.fromkeys(matrix.kind for matrix in decomposed if matrix.losses))
    layers = sorted({matrix.layer for matrix in decomposed})
    colors = {layer: _DEPTHS(0.35 + 0.45 * index / max(len(layers) - 1, 1)) for index, layer in enumerate(layers)}
    figure, panels = panel_grid(kinds, 0.7, 1.5, sharey=True)
    for axes, kind in zip(panels, kinds, strict=True):
        for matrix in (matrix for matrix in decomposed if matrix.kind == kind):
            # The mean saving of the singular values between two ranks stands over the middle of these ranks.
            steps = zip(matrix.losses[:-1], matrix.losses[1:], strict=True)
            points = [((low + high + 1) / 2, (before - after) / (high - low)) for (low, before), (high, after) in steps]
            points = [(place, saved) for place, saved in points if saved > 0]  # a logarithm needs them positive
            if not points:
                continue
            axes.plot(*zip(*points, strict=True), color=colors[matrix.layer], linewidth=1, alpha=0.75)
            if matrix.rank is not None:
                _, nearest = min((abs(place - matrix.rank), (place, saved)) for place, saved in points)
                axes.plot(*nearest, marker="o", markersize=3.5, color=colors[matrix.layer])
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    figure.supxlabel("singular value", fontsize=9)
    figure.supylabel("predicted loss per token", fontsize=9)
    ends = list(dict.fromkeys((layers[0], layers[-1])))
    handles = [Line2D([], [], color=colors[layer], label=f"layer {layer}") for layer in ends]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=8)
    return figure
