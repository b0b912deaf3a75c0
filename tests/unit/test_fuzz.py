"""scripts/torture/fuzz.py finds what a reader may not do, and says how to get atheris, which only an extra brings."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest

from support import ROOT

pytestmark = pytest.mark.tools

HAS_ATHERIS = importlib.util.find_spec("atheris") is not None
CODE = """
import json, os, sys
sys.path.insert(0, "scripts/torture")
import atheris, fuzz
from pathlib import Path

os.environ["HF_HOME"] = sys.argv[1] + "/libraries"
fuzz.load(atheris)
from llmdistill.errors import UserError
from readers import READERS, one

@atheris.instrument_func
def raises(path):
    content = path.read_bytes()
    if content and content[0] == ord("F"):
        raise KeyError("fuzz")
    raise UserError("another file: give it")

def writes(path):
    (path.parents[1] / "elsewhere").write_text("x")

def two_lines(path):
    error = UserError("one: give it")
    error.args = ("one\\ntwo",)
    raise error

for reader in (one("a", b"abc", raises), one("a", b"abc", writes), one("a", b"abc", two_lines), READERS["hosts"]):
    folder = Path(sys.argv[1]) / str(reader.files.keys())
    tried = fuzz.try_reader(atheris, reader, folder, 4)
    print(json.dumps([tried.inputs, tried.edges, tried.finding, (folder / fuzz.FAILED).is_file()]))
"""


@pytest.mark.skipif(not HAS_ATHERIS, reason="atheris is not installed; it is in the extra fuzz")
def test_it_finds_what_a_reader_may_not_do(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    raises, writes, two_lines, hosts = map(json.loads, done.stdout.splitlines())
    assert raises[2] == "KeyError: 'fuzz'"
    assert writes[2].startswith("AssertionError: the reader did open ")
    assert two_lines[2].startswith("AssertionError")
    assert all(each[3] for each in (raises, writes, two_lines))
    assert hosts[2] is None
    assert hosts[0] > 100
    assert hosts[1][1] > hosts[1][0] > 0, "the inputs reach more than the valid file does"


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
