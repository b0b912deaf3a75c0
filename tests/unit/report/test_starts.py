"""What a report shows of weighted students: their ranks, their spectra, and quality against size by start."""

from __future__ import annotations

import pytest

from llmdistill.report.starts import draw_predictions, draw_weighting, matrices, plot_ranks, plot_spectra

SAVED = {"layers.0.attn.k": [3.0, 2.0, 1.0], "layers.1.attn.k": [30.0, 20.0, 10.0], "layers.0.mlp.up": [0.3, 0.2, 0.1]}
"""What each singular value saves, by matrix; all matrices are (4, 12)."""


def costs(saved):
    return [[rank, 0.5 + sum(saved[rank:])] for rank in range(len(saved) + 1)]


def weighting(**changes):
    spectra = {name: {"shape": [4, 12], "costs": costs(saved)} for name, saved in SAVED.items()}
    ranks = {"layers.0.attn.k": 2, "layers.0.mlp.up": 1}
    return {"weighting": "gradients", "ranks": ranks, "spectra": spectra, **changes}


def test_matrices_have_layer_kind_rank_and_what_is_kept():
    found = matrices(weighting())
    assert [(each.layer, each.kind, each.rank) for each in found] == [(1, "k", 2), (2, "k", None), (1, "up", 1)]
    assert [each.kept for each in found] == pytest.approx([2 * 16 / 48, 1.0, 16 / 48])
    # In the plot a dense matrix has a cross.
    axes = plot_ranks(found).axes[0]
    assert {(*text.get_position(), text.get_text()) for text in axes.texts} == {(0, 0, "2"), (0, 1, "1")}
    (crosses,) = axes.lines
    assert (crosses.get_marker(), list(crosses.get_xdata()), list(crosses.get_ydata())) == ("x", [1], [0])
    shares = axes.collections[0].get_array()
    assert shares[0, 0] == pytest.approx(2 / 3)
    assert shares.mask.tolist() == [[False, False], [False, True]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["k", "up"]


def test_spectra_are_the_savings_of_single_values_with_a_dot_at_the_rank():
    panels = plot_spectra(matrices(weighting())).axes
    assert [panel.get_title(loc="left") for panel in panels] == ["k", "up"]
    first, dot, second = panels[0].lines
    assert list(first.get_xdata()) == [1, 2, 3]
    assert list(first.get_ydata()) == pytest.approx(SAVED["layers.0.attn.k"])
    assert list(second.get_ydata()) == pytest.approx(SAVED["layers.1.attn.k"])
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == pytest.approx((2, 2.0))
    assert panels[0].get_yscale() == "log"


def test_only_what_says_something_is_drawn():
    assert [drawing.name for drawing in draw_weighting(weighting())] == ["ranks", "spectra"]
    one_rank = dict.fromkeys(SAVED, 2)
    assert [drawing.name for drawing in draw_weighting(weighting(ranks=one_rank))] == ["spectra"]
    # Outputs of different matrices have no common unit.
    assert draw_weighting(weighting(ranks=one_rank, weighting="activations")) == draw_weighting({}) == []
    assert draw_weighting({"ranks": one_rank, "tokens": 5}) == []


def test_predictions_are_drawn_against_what_was_measured():
    # Measured is 2 · predicted^1.5, so the logarithms lie on a line; the student is the better one of the two.
    pairs = [(predicted, 2 * predicted**1.5) for predicted in (0.01, 0.1, 1.0)]
    of_students = [weighting(predicted_loss=x, held_out={"loss": y, "uniform": 9.0}) for x, y in pairs]
    drawing = draw_predictions([*of_students, weighting(weighting="activations"), {}])
    assert drawing is not None
    assert "correlate by 1.0000" in drawing.caption
    (axes,) = drawing.figure.axes
    equal, points = axes.lines
    assert [tuple(pair) for pair in points.get_xydata()] == [pytest.approx(pair) for pair in pairs]
    assert list(equal.get_xdata()) == list(equal.get_ydata()) == pytest.approx([0.002, 2.0])
    assert draw_predictions(of_students[:2]) is None
