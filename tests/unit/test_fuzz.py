"""scripts/torture/fuzz.py finds what a reader may not do, and says how to get atheris, which only an extra brings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

from support import ROOT

pytestmark = pytest.mark.slow

HAS_ATHERIS = importlib.util.find_spec("atheris") is not None


@pytest.mark.skipif(HAS_ATHERIS, reason="atheris is installed")
def test_it_says_how_to_install_atheris() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/torture/fuzz.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: atheris is not installed; pip install")
    assert done.stderr.count("\n") == 1


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
