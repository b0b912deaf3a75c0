"""The plots of a comparison and of weighted students: which there are, and how they look."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from llmdistill.report import plots
from llmdistill.report.drawings import draw_comparison
from llmdistill.report.panels import plot_terms
from llmdistill.report.results import TABLE_SIZE, Comparison, ComparisonRow, UntrainedStudent
from llmdistill.report.score import PERPLEXITY, ROUGE_L
from llmdistill.report.tables import Spread
from llmdistill.report.trials import TrialRow, entry_of
from llmdistill.report.weighting import draw_predictions, draw_weighting, plot_ranks, plot_spectra, read_matrices


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
    assert found.steps == [0, 10, 20]
    np.testing.assert_allclose(found.mean, values.mean(axis=0))
    np.testing.assert_allclose(found.low, values.min(axis=0))
    np.testing.assert_allclose(found.high, values.max(axis=0))
    assert plots.mean_curve(histories, "valid_loss") is None
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": math.inf}]
    assert plots.mean_curve([history], "loss").steps == [1]


def test_scores_stand_where_their_numbers_are():
    dots = [
        ("KD", styles(1)["m0"], Spread(40.0, 1.5, [39.0, 41.0])),
        ("SFT", styles(1)["m0"], Spread(30.0, 0, [30.0])),
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


STARTS, METHODS = ("plain", "loss"), ("none", "kd", "makd")


def make_row(name, start="", level=0.0, score=ROUGE_L, **more):
    log = [{"step": step, "loss": 2.0, "valid_loss": 3.0} for step in (1, 2)] if name in ("kd", "makd") else []
    model = {"teacher": "teacher", "none": "untrained"}.get(name, "student")
    entry = entry_of({("seen", ROUGE_L.key): level, ("seen", PERPLEXITY.key): level})
    run = TrialRow(row=name, title=name, seed=0, folder="f", models={model: entry})
    about = {"score": score, "runs": [run], "logs": {"f": log}, "params": 500}
    return ComparisonRow(name=name, label=name.upper(), start=start, **{**about, **more})


@pytest.fixture
def comparison():
    rows = [
        make_row("teacher", level=90.0),
        *(make_row(name, start, 10.0 * number) for number, start in enumerate(STARTS, 1) for name in METHODS),
    ]
    sizes = [make_row(row.name, row.start, 5.0, params=300) for row in rows[1:]]
    weighting = {"ranks": {"layers.0.q": 2, "layers.1.q": 3}}
    about = {"label": "", "size": TABLE_SIZE, "folder": "b", "params": 500, "average": 1.0}
    weighted = UntrainedStudent(start="loss", weighting=weighting, **about)
    return Comparison(title="t", sets=["seen"], rows=rows, sizes=[*rows[1:], *sizes], untrained=[weighted])


def test_each_start_has_its_curves_and_its_ranks(comparison):
    drawn = {drawing.name: drawing for drawing in draw_comparison(comparison)}
    assert list(drawn) == ["scores", "learning_curves_plain", "learning_curves_loss", "size", "ranks_loss"]
    assert drawn["scores"].caption.startswith("One seed")
    labels = [label.get_text() for label in drawn["scores"].figure.axes[0].get_yticklabels()]
    assert labels == [f"{name} from {start}" for start in STARTS for name in ("NONE", "KD", "MAKD")]
    assert drawn["learning_curves_loss"].title == "Learning curves: from loss"
    assert drawn["scores"].figure.axes[0].get_xscale() == drawn["size"].figure.axes[0].get_yscale() == "linear"
    # Quality against size, for the untrained students and each method.
    panels = [panel for panel in drawn["size"].figure.axes if panel.get_visible()]
    assert [panel.get_title(loc="left") for panel in panels] == ["NONE", "KD", "MAKD"]
    for panel in panels:
        assert [list(line.get_ydata()) for line in panel.lines[:2]] == [[5.0, 10.0], [5.0, 20.0]]


def test_perplexities_have_logarithmic_axes(comparison):
    rows, sizes = ([replace(row, score=PERPLEXITY) for row in each] for each in (comparison.rows, comparison.sizes))
    drawn = {drawing.name: drawing for drawing in draw_comparison(replace(comparison, rows=rows, sizes=sizes))}
    scores, size = drawn["scores"].figure.axes[0], [axes for axes in drawn["size"].figure.axes if axes.get_visible()]
    assert (scores.get_xscale(), {axes.get_yscale() for axes in size}) == ("log", {"log"})
    assert scores.get_xlabel() == drawn["size"].figure.get_supylabel() == "perplexity of seen\n(lower is better)"
    assert "each method's own loss" in drawn["learning_curves_loss"].caption


SAVED = {"layers.0.attn.k": [3.0, 2.0, 1.0], "layers.1.attn.k": [30.0, 20.0, 10.0], "layers.0.mlp.up": [0.3, 0.2, 0.1]}
"""What each singular value saves, by matrix; all matrices are (4, 12)."""


def costs(saved):
    return [[rank, 0.5 + sum(saved[rank:])] for rank in range(len(saved) + 1)]


def weighting(**changes):
    spectra = {name: {"shape": [4, 12], "costs": costs(saved)} for name, saved in SAVED.items()}
    ranks = {"layers.0.attn.k": 2, "layers.0.mlp.up": 1}
    return {"weighting": "gradients", "ranks": ranks, "spectra": spectra, **changes}


def test_matrices_have_layer_kind_rank_and_what_is_kept():
    found = read_matrices(weighting())
    assert [(each.layer, each.kind, each.rank) for each in found] == [(1, "k", 2), (2, "k", None), (1, "up", 1)]
    assert [each.share for each in found] == pytest.approx([2 * 16 / 48, 1.0, 16 / 48])
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
    panels = plot_spectra(read_matrices(weighting())).axes
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
    assert "correlate by 1.0000" in drawing.caption
    (axes,) = drawing.figure.axes
    equal, points = axes.lines
    assert [tuple(pair) for pair in points.get_xydata()] == [pytest.approx(pair) for pair in pairs]
    assert list(equal.get_xdata()) == list(equal.get_ydata()) == pytest.approx([0.002, 2.0])
    assert draw_predictions(of_students[:2]) is None
