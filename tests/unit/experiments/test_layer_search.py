"""The table and the plot of the search for the teacher's layer."""

from __future__ import annotations

import io

from rich.console import Console

from llmdistill.experiments.layer_search import plot_layers, print_layers


def test_the_layers_curve_marks_the_best(tmp_path):
    out = io.StringIO()
    losses = {2: 4.0, 3: 3.0, 4: 3.5}
    print_layers(losses, tmp_path, Console(file=out, width=80))
    plot_layers(losses, tmp_path)
    lines = [line for line in out.getvalue().splitlines() if "chosen" in line]
    assert len(lines) == 1
    assert lines[0].split()[:2] == ["3", "3.0000"]
    assert (tmp_path / "layer_search.svg").is_file()
