"""The points of t-SNE."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from llmdistill.report.plots import COLORS, Cloud, plot_clusters, save_plot


def clouds(count: int, rows: int = 12) -> list[Cloud]:
    generator = np.random.default_rng(0)
    return [Cloud(f"m{n}", f"layer {n}", generator.normal(size=(rows, 2))) for n in range(count)]


def test_each_class_has_its_points_and_its_color() -> None:
    (cloud,) = clouds(1)
    targets = np.array([0, 1, 1] * 4)
    axes = plot_clusters([cloud], targets, ("0", "1")).axes[0]
    for index, drawn in enumerate(axes.collections):
        np.testing.assert_array_equal(drawn.get_offsets(), cloud.points[targets == index])
        assert to_hex(drawn.get_facecolor()[0]) == COLORS[index]
    assert axes.get_title(loc="left").strip() == "m0"
    assert not axes.get_xticks().size
    assert not axes.get_yticks().size


def test_one_legend_names_the_classes() -> None:
    figure = plot_clusters(clouds(3), np.array([0, 1] * 6), ("0", "1"))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["class 0", "class 1"]
    named = plot_clusters(clouds(1), np.array([0, 1] * 6), ("entailment", "not_entailment")).legends[0]
    assert [text.get_text() for text in named.get_texts()] == ["entailment", "not_entailment"]


def test_scores_color_by_a_scale() -> None:
    targets = np.linspace(0, 5, 12)
    figure = plot_clusters(clouds(2), targets, ())
    np.testing.assert_array_equal(figure.axes[0].collections[0].get_array(), targets)
    assert figure.axes[-1].get_ylabel() == "score"
    assert not figure.legends


@pytest.mark.parametrize(("count", "visible"), [(1, 1), (3, 3), (4, 4)])
def test_panels_are_as_many_as_models(count, visible, tmp_path) -> None:
    figure = plot_clusters(clouds(count), np.array([0, 1] * 6), ("no", "yes"))
    assert sum(axes.get_visible() for axes in figure.axes) == visible
    first = save_plot(figure, tmp_path, "tsne")
    assert save_plot(plot_clusters(clouds(count), np.array([0, 1] * 6), ("no", "yes")), tmp_path, "tsne") == first
