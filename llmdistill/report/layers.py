"""The curve of scores over the teacher's layers, the result of a layer search (MiniLMv2 Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from llmdistill.report.plots import Curve, method_styles, plot_curves, save_plot
from llmdistill.report.tables import print_table

NAME = "layer_search"


class LayerScore(NamedTuple):
    """The score of a student that learned from one layer of the teacher."""

    layer: int
    """The layer of the teacher, counted from 1."""
    loss: float
    """Validation loss after the steps with the token loss; lower is better."""


def plot_layers(scores: Sequence[LayerScore], folder: Path) -> None:
    """Write layer_search.png and layer_search.svg."""
    losses = [score.loss for score in scores]
    curve = Curve([float(score.layer) for score in scores], losses, losses, losses)
    style = method_styles(["student"])["student"]
    figure = plot_curves([("student", style, curve)], "validation loss (lower is better)")
    axes = figure.axes[0]
    axes.set_xlabel("layer of the teacher, from 1")
    axes.get_legend().remove()  # type: ignore[union-attr]
    best = min(scores, key=lambda score: score.loss)
    axes.plot(best.layer, best.loss, marker="o", markersize=11, fillstyle="none", color=style.color)
    save_plot(figure, folder, NAME)


def print_layers(scores: Sequence[LayerScore], folder: Path, console: Console | None = None) -> None:
    """Print the curve as a table with one bar per layer and a mark at the best layer."""
    losses = [score.loss for score in scores]
    best, worst = min(losses), max(losses)
    rows = []
    for score in scores:
        bar = "█" * round(30 * (worst - score.loss) / (worst - best)) if worst > best else ""
        chosen = " chosen" if score.loss == best else ""
        rows.append([str(score.layer), f"{score.loss:.4f}", f"{bar} {worst - score.loss:.4f}{chosen}".strip()])
    out = console or Console()
    header = ["layer", "validation loss", "better than the worst by"]
    print_table("Which layer of the teacher to learn from", header, rows, left=(2,), console=out)
    out.print(f"The curve is in {folder / NAME}.png", soft_wrap=True)
