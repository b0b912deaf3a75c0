"""Plots of several panels."""

from __future__ import annotations

from llmdistill.report.panels import plot_panels, plot_terms
from llmdistill.report.plots import Curve, method_styles

STYLES = method_styles(["first", "second"])


def curve(values: list[float]) -> Curve:
    return Curve(list(range(1, len(values) + 1)), values, values, values)


def test_terms_have_a_panel_each_and_a_logarithm_where_they_spread() -> None:
    terms = {"wide": curve([10.0, 1.0, 0.01]), "narrow": curve([2.0, 1.5]), "negative": curve([10.0, -1.0])}
    figure = plot_terms({**terms, "fourth": curve([1.0]), "fifth": curve([1.0])}, STYLES["first"])
    assert [panel.get_title(loc="left") for panel in figure.axes if panel.get_visible()] == [*terms, "fourth", "fifth"]
    assert [panel.get_yscale() for panel in figure.axes[:3]] == ["log", "linear", "linear"]
    assert not figure.legends


def test_scores_are_never_on_a_logarithm_and_share_a_legend() -> None:
    lines = {
        "CoLA": [("A", STYLES["first"], curve([1.0, 50.0]))],
        "RTE": [("A", STYLES["first"], curve([60.0])), ("B", STYLES["second"]._replace(fill="none"), curve([61.0]))],
    }
    figure = plot_panels(lines, "layer", scores=True)
    assert [panel.get_yscale() for panel in figure.axes] == ["linear", "linear"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["A", "B"]
    assert [line.get_fillstyle() for line in figure.axes[1].lines] == ["full", "none"]
    assert figure.get_supxlabel() == "layer"
