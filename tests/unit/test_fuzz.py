"""scripts/torture/fuzz.py finds what a reader may not do."""

import subprocess
from pathlib import Path

import fuzz
import pytest

pytestmark = pytest.mark.slow


def test_what_a_reader_did_is_told_apart(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    watch = fuzz.Watch(own)
    (tmp_path / "before").write_text("not watched yet")
    watch.begin()
    (own / "a").write_text("in its folder")
    (own / "a").read_text()
    Path(__file__).read_text()
    watch.end()
    for act in (other.mkdir, lambda: (tmp_path / "b").write_text("x"), lambda: subprocess.run(["true"], check=True)):
        watch.begin()
        act()
        with pytest.raises(AssertionError, match="the reader did"):
            watch.end()
