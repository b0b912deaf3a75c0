"""The figure of attention maps."""

from __future__ import annotations

import numpy as np

from llmdistill.report.attention import Panel, plot_attention
from llmdistill.report.plots import save_plot


def test_models_stand_side_by_side_with_tokens_on_the_axes(tmp_path) -> None:
    rng = np.random.default_rng(0)
    shares = [[rng.dirichlet(np.ones(4), size=4) for _ in range(2)] for _ in range(2)]
    rows = [
        [Panel(name, f"head {head}", each) for name, each in zip(("teacher", "student"), pair, strict=True)]
        for head, pair in enumerate(shares)
    ]
    tokens = ["[CLS]", "a", "$b$", "[SEP]"]
    figure = plot_attention(rows, tokens)
    panels, bars = figure.axes[:4], figure.axes[4:]
    assert len(bars) == 2
    for axes, panel in zip(panels, [panel for row in rows for panel in row], strict=True):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), panel.shares)
        assert axes.get_title(loc="left").strip() == panel.title
        assert [text.get_text() for text in axes.texts] == [panel.note]
        # Rows are queries, the first at the top, and columns are keys.
        assert image.origin == "upper"
    for one, other in (panels[:2], panels[2:]):
        limits = [(axes.images[0].norm.vmin, axes.images[0].norm.vmax) for axes in (one, other)]
        assert limits[0] == limits[1]
        assert [label.get_text() for label in one.get_yticklabels()] == tokens
        assert [label.get_text() for label in other.get_yticklabels()] == [""] * 4
    assert [label.get_text() for label in panels[2].get_xticklabels()] == tokens
    assert "$b$" in save_plot(figure, tmp_path, "attention-1")
