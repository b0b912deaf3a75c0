"""Old and new records: the same, different, and what is kept beside a result."""

from pathlib import Path

import pytest
from damage import flip

from llmdistill.artifacts import (
    MANIFEST,
    compare_records,
    manifest_damage,
    new_proven_folder,
    read_record,
    read_result,
    write_result,
)
from llmdistill.errors import UserError

ASKED = {"seed": 1, "kd": {"ratio": 0.5}, "betas": (0.9, 0.999)}


def compare(old, new):
    compare_records(old, new, subject="here", remedy="do that")


def test_the_first_difference_and_the_number_of_others_are_named() -> None:
    compare(None, ASKED)
    compare({**ASKED, "betas": [0.9, 0.999]}, ASKED)
    old, new = {"ranks": 1, "train": {"micro": 8, "steps": 5}}, {"ranks": 2, "train": {"micro": 4, "steps": 5}}
    with pytest.raises(UserError, match=r"^here: ranks was 1 and is now 2 \(and 1 more\); do that$"):
        compare(old, new)
    with pytest.raises(UserError, match=r"^here: train\.steps was 5 and is now 6; do that$"):
        compare(old, {"ranks": 1, "train": {"micro": 8, "steps": 6}})


def test_a_kept_result_comes_back_to_the_same_record_alone(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "sizes.json"
    assert read_result(file, ASKED) is None
    kept = write_result(file, ASKED, {"score": 50.0})
    assert read_result(file, ASKED) == kept == {"asked": {**ASKED, "betas": [0.9, 0.999]}, "score": 50.0}
    assert read_result(file, {**ASKED, "seed": 2}) is None


def test_a_record_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    for content, said in (('"text"', "not a JSON object"), ('{"step": "1"}', "it has no step, or one of another type")):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"^{file}: {said}; remove it$"):
            read_record(file, remedy="remove it", keys={"step": int})


def test_a_manifest_names_the_first_file_that_changed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with new_proven_folder(folder) as part:
        (part / "sub").mkdir()
        for name, text in (("a", "first"), ("sub/b", "second"), ("c", "third")):
            (part / name).write_text(text)
    assert manifest_damage(folder) is None
    (folder / "new").write_text("of the user")
    assert manifest_damage(folder) is None
    with flip(folder / "a", 0):
        assert [manifest_damage(folder, slice(rank, None, 2)) is None for rank in (0, 1)] == [False, True]
    (folder / "sub" / "b").write_text("cut")
    assert manifest_damage(folder) == f"{folder}/sub/b has 3 bytes and had 6 when it was written"
    (folder / "sub" / "b").unlink()
    assert manifest_damage(folder) == f"{folder}/sub/b is missing"
    (folder / MANIFEST).unlink()
    assert manifest_damage(folder) is None
