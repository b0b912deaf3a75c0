"""Tables of texts."""

from __future__ import annotations

import io

from rich.console import Console

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
