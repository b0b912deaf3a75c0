"""The plots of a comparison."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from llmdistill.report import plots
from llmdistill.report.panels import plot_terms
from llmdistill.report.score import ROUGE_L


def curve(values, steps=None):
    steps = list(range(1, len(values) + 1)) if steps is None else steps
    return plots.Curve(steps, values, [value * 0.9 for value in values], [value * 1.1 for value in values])


def styles(number):
    return plots.method_styles([f"m{index}" for index in range(number)])


def test_curve_is_mean_and_range_over_runs():
    values = np.array([[3.0, 2.0, 1.0], [5.0, 2.5, 2.0]])
    histories = [[{"step": 10 * n, "loss": value} for n, value in enumerate(run)] for run in values]
    histories[0].insert(1, {"step": 5})
    found = plots.mean_curve(histories, "loss")
    assert found is not None
    assert found.steps == [0, 10, 20]
    np.testing.assert_allclose(found.mean, values.mean(axis=0))
    np.testing.assert_allclose(found.low, values.min(axis=0))
    np.testing.assert_allclose(found.high, values.max(axis=0))
    assert plots.mean_curve(histories, "valid_loss") is None
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": math.inf}]
    finite = plots.mean_curve([history], "loss")
    assert finite is not None
    assert finite.steps == [1]


def test_scores_stand_where_their_numbers_are():
    dots = [
        plots.Dots("KD", styles(1)["m0"], 40.0, 1.5, [39.0, 41.0]),
        plots.Dots("SFT", styles(1)["m0"], 30.0, 0, [30.0]),
    ]
    axes = plots.plot_scores(dots, 50.0, ROUGE_L, ["seen"]).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["KD", "SFT"]
    bar = axes.containers[0]
    assert bar[0].get_xdata() == pytest.approx([40.0])
    assert bar[2][0].get_segments()[0][:, 0] == pytest.approx([38.5, 41.5])
    assert any(list(line.get_xdata()) == [50.0, 50.0] for line in axes.lines)


def test_the_text_of_a_saved_plot_is_text(tmp_path):
    figure = plots.plot_curves([("$5 <b> $6", styles(1)["m0"], curve([3.0, 1.0]))], "loss & more")
    text = plots.save_plot(figure, tmp_path, "plot")
    items = [item for item in ElementTree.fromstring(text).iter() if item.tag.endswith("}text")]
    assert {"$5 <b> $6", "loss & more"} <= {"".join(item.itertext()).strip() for item in items}


def test_terms_have_a_panel_each_and_a_logarithm_where_they_spread() -> None:
    terms = {"wide": curve([10.0, 1.0, 0.01]), "narrow": curve([2.0, 1.5]), "negative": curve([10.0, -1.0])}
    figure = plot_terms({**terms, "fourth": curve([1.0]), "fifth": curve([1.0])}, styles(2)["m0"])
    assert [panel.get_title(loc="left") for panel in figure.axes if panel.get_visible()] == [*terms, "fourth", "fifth"]
    assert [panel.get_yscale() for panel in figure.axes[:3]] == ["log", "linear", "linear"]
    assert not figure.legends
