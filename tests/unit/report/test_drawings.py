"""Which plots the report of a comparison of starts has, and how they look."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmdistill.report.drawings import draw_comparison
from llmdistill.report.results import TABLE_SIZE, Beginning, Comparison, Row, Run
from llmdistill.report.score import PERPLEXITY

STARTS, METHODS = ("plain", "loss"), ("none", "kd", "makd")


def make_row(name, start="", level=0.0, **more):
    history = [{"step": step, "loss": 2.0, "valid_loss": 3.0} for step in (1, 2)] if name in ("kd", "makd") else ()
    run = Run(method=name, seed=0, folder="f", command="c", scores={"seen": level}, history=history)
    return Row(name=name, label=name.upper(), start=start, runs=[run], **{"params": 500, **more})


@pytest.fixture
def comparison():
    rows = [
        make_row("teacher", level=90.0),
        *(make_row(name, start, 10.0 * number) for number, start in enumerate(STARTS, 1) for name in METHODS),
    ]
    sizes = [make_row(row.name, row.start, 5.0, params=300) for row in rows[1:]]
    weighting = {"ranks": {"layers.0.q": 2, "layers.1.q": 3}}
    about = {"label": "", "size": TABLE_SIZE, "folder": "b", "params": 500, "average": 1.0}
    weighted = Beginning(start="loss", weighting=weighting, **about)
    return Comparison(title="t", sets=["seen"], rows=rows, sizes=[*rows[1:], *sizes], beginnings=[weighted])


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
