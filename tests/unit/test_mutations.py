"""The list of deliberate breaks fits the tree; tests/mutations.py tries them."""

from __future__ import annotations

import re
from pathlib import Path

from mutations import BREAKS

ROOT = Path(__file__).resolve().parents[2]


def test_every_break_fits_the_tree() -> None:
    assert len({each.name for each in BREAKS}) == len(BREAKS) >= 60
    for each in BREAKS:
        assert (ROOT / each.file).read_text(encoding="utf-8").count(each.old) == 1, each.name
        assert each.old != each.new, each.name
        for node in each.tests:
            file, *_, name = node.split("::") if "::" in node else (node, "")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), f"{each.name}: {node}"
