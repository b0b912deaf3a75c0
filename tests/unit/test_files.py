"""Whole or not at all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmdistill.errors import UserError
from llmdistill.files import byte_size, new_folder, remove_abandoned, temporary_folder, write_json


def test_folder_gets_its_name_only_at_the_end(tmp_path):
    with new_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(RuntimeError), new_folder(tmp_path / "failed"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_has_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "out") as partial:
            (partial / "in").mkdir(mode=0o700)
            for name in ("a", "in/b"):
                (partial / name).write_text("1")
                (partial / name).chmod(0o600)  # as safetensors writes
    finally:
        assert os.umask(before) == 0o027
    modes = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
    assert modes == {"out": 0o750, "in": 0o750, "a": 0o640, "b": 0o640}


def kill(path: Path) -> None:
    """Begin a folder in another process, and kill it there."""
    code = f"import os, signal\nfrom llmdistill.files import new_folder\nwith new_folder({str(path)!r}) as part:\n"
    code += "    (part / 'a').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_what_a_kill_has_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    for _ in range(2):
        kill(tmp_path / "out")
    assert len(list(tmp_path.iterdir())) == 1  # the second has removed what the first left
    for name in (".out.by-user", ".other.abcdefgh.part"):
        (tmp_path / name).mkdir()
    with new_folder(tmp_path / "out") as first:
        (first / "a").write_text("1")
        with new_folder(tmp_path / "out") as second:
            (second / "b").write_text("2")
        assert (first / "a").read_text() == "1"
        (tmp_path / "out" / "b").unlink()
    assert (tmp_path / "out" / "a").read_text() == "1"
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.by-user", ".other.abcdefgh.part"}


def test_what_kills_have_left_of_any_name_is_removed_at_once(tmp_path):
    (tmp_path / ".two.safetensors.abcdefgh.part").mkdir()
    mine = {".vscode", ".other.settings", "out.abcdefgh.part", "metrics.json"}
    for name in mine:
        (tmp_path / name).mkdir()
    with temporary_folder(tmp_path / "three") as living:
        remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {*mine, living.name}


def test_json_is_written_whole_and_a_file_in_place_of_the_folder_is_one_sentence(tmp_path):
    write_json(tmp_path / "new" / "a.json", {"x": "é"})
    assert json.loads((tmp_path / "new" / "a.json").read_text(encoding="utf-8")) == {"x": "é"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "file").write_text("")
    said = r"the system refuses it \((not a directory|file exists)\): choose another path"
    with pytest.raises(UserError, match=said):
        write_json(tmp_path / "file" / "a.json", {})
    with pytest.raises(UserError, match=said):
        new_folder(tmp_path / "file" / "out").__enter__()


def test_sizes_have_the_unit_that_fits():
    sizes = (None, 1_550, 999_999, 1_000_000, 1_234_560_000_000)
    assert [byte_size(size) for size in sizes] == ["–", "1.6 kB", "1000.0 kB", "1.0 MB", "1,234.6 GB"]
