"""Tables of texts."""

from __future__ import annotations

import io
import statistics

from rich.console import Console

from llmdistill.report.spread import over_seeds, plus_minus, show_seeds
from llmdistill.report.tables import print_table

HEADER, ROWS = ["model", "stage", "RTE accuracy"], [["teacher", "one", "70.1"], ["student of it", "two", "9.5"]]


def printed(width, **settings):
    out = io.StringIO()
    print_table("A title", HEADER, ROWS, console=Console(file=out, width=width), **settings)
    return [line.strip() for line in out.getvalue().splitlines()]


def test_a_table_too_wide_is_turned():
    narrow = printed(28, turned=True)
    assert any(line.startswith("RTE") and line.endswith("9.5") for line in narrow), narrow
    assert not any(line.startswith("RTE") for line in printed(80, turned=True))


def test_mean_and_deviation():
    values = [1.0, 2.0, 4.0]
    assert show_seeds(over_seeds(values), 2) == f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert show_seeds(over_seeds([3.0])) == "3.0"
    assert over_seeds([3.0]) == {"mean": 3.0, "std": None, "seeds": [3.0]}
    assert plus_minus(1.26, 0.04) == "1.3 ± 0.0"
