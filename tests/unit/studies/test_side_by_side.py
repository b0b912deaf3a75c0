"""The models that stand side by side, by what a user names."""

import json
from pathlib import Path

import pytest

from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.studies.side_by_side import default_folder, named_models


def make_run(folder: Path, *, finished: bool = True) -> Path:
    """The folder of a run whose student began as a model of its own."""
    folder.mkdir()
    config = {"teacher": {"model": "embedded:teacher"}, "student": {"model": "hub/begin"}}
    (folder / "run.json").write_text(json.dumps({"config": config}), encoding="utf-8")
    if finished:
        (folder / "metrics.json").write_text("{}", encoding="utf-8")
    return folder


def test_a_run_is_its_three_models_and_with_a_name_its_student(tmp_path: Path) -> None:
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    assert named_models([str(one), f"b={other}", "c=hub/model", "hub/model"]) == {
        "teacher": locate("embedded:teacher"),
        "untrained": Path("hub/begin"),
        "trained": one / "student",
        "b": other / "student",
        "c": Path("hub/model"),
        "hub/model": Path("hub/model"),
    }
    (one / "untrained").mkdir()
    assert named_models([str(one)])["untrained"] == one / "untrained"
    with pytest.raises(UserError, match="would both be called teacher; write NAME=FOLDER for one of them"):
        named_models([str(one), str(other)])
    with pytest.raises(UserError, match="the run in this folder is not finished"):
        named_models([f"a={make_run(tmp_path / 'begun', finished=False)}"])
    # Results go into the run.
    assert default_folder("attention", str(one)) == one / "attention"
    assert default_folder("attention", "a=hub/model") == Path("runs/attention/a-hub-model")
