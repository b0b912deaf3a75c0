"""Whole or not at all."""

from __future__ import annotations

import json

import pytest

from llmdistill.errors import UserError
from llmdistill.files import new_folder, write_json


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "new" / "a.json", {"x": "é"})
    assert json.loads((tmp_path / "new" / "a.json").read_text(encoding="utf-8")) == {"x": "é"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_folder_gets_its_name_only_at_the_end(tmp_path):
    with new_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(RuntimeError), new_folder(tmp_path / "failed"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "a").write_text("1")
    with pytest.raises(UserError, match="exists and is not empty"), new_folder(tmp_path):
        pass
