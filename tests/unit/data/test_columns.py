"""Examples that are kept as columns of numbers are those that were written."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmdistill.data.columns import Layout, SplitWriter, StoredSplits, in_pieces
from llmdistill.data.pairs import PAIRS, EncodedPair
from llmdistill.data.store import store
from llmdistill.data.targets import TARGETS, EncodedTarget

CLASSES = [EncodedPair([5, 6, 7][: 1 + n % 3], [0, 1, 1][: 1 + n % 3], n % 3, n + 10) for n in range(7)]
SCORES = [EncodedPair([70_000 + n], None, n / 3, n) for n in range(3)]
TEST = [EncodedPair([n, 1], [0, 0], None, 30 - n) for n in range(4)]
WRITTEN = [EncodedTarget(list(range(n)), [1] * (n % 2)) for n in range(1, 6)]


def kept(folder: Path, splits: dict[str, tuple[list[Any], Layout[Any]]], token_ids: type = np.uint32) -> StoredSplits:
    """What is written two examples at a time, and mapped."""

    def write(part: Path) -> dict[str, Any]:
        writer = SplitWriter(part, np.dtype(token_ids))
        for name, (items, layout) in splits.items():
            writer.add(name, in_pieces(items, 2), layout)
            writer.add_text(name, {"text": [name, "ß\n"]})
        return writer.record()

    return StoredSplits(store(folder / "set", {}, write))


@pytest.mark.parametrize(
    ("items", "layout"), [(CLASSES, PAIRS), (SCORES, PAIRS), (TEST, PAIRS), (WRITTEN, TARGETS)], ids=range(4)
)
def test_what_is_written_is_read(tmp_path, items, layout):
    stored = kept(tmp_path, {"other": (WRITTEN[:1], TARGETS), "train": (items, layout)})
    found = stored.items("train", layout)
    assert [astuple(each) for each in found] == [astuple(each) for each in items]
    assert [repr(each) for each in found] == [repr(each) for each in items], "plain Python numbers, not numpy's"
    assert [astuple(each) for each in found[1:3]] == [astuple(each) for each in items[1:3]]
    assert [found.length(place) for place in range(len(found))] == [len(each) for each in items]
    assert found.longest == max(map(len, items))
    assert found[-1] == items[-1]
    assert stored.text("train") == {"text": ["train", "ß\n"]}
    with pytest.raises(IndexError):
        found[len(items)]


def test_an_example_is_made_only_when_it_is_asked_for(tmp_path):
    stored = kept(tmp_path, {"train": (CLASSES, PAIRS)})
    made: list[int] = []
    allocated = pa.total_allocated_bytes()
    watched = Layout(make=lambda index, **_: made.append(index), columns=PAIRS.columns)
    found = stored.items("train", watched)
    assert (len(found), found.longest, found.length(2), made) == (7, 3, 3, [])
    found[4]
    assert made == [14]
    assert pa.total_allocated_bytes() == allocated, "the ranks of a node share the pages of the file"
