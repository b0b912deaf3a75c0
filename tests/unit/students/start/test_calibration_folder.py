"""The folder of kept factors: what was put comes back, whole or not at all, and only for the same measurement."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
from damage import damage, kinds
from safetensors.torch import save_file

from llmdistill.errors import UserError
from llmdistill.students.start.calibration_folder import RECORD, SavedFactors
from llmdistill.students.start.table_moments import TableMoments
from llmdistill.students.start.weighted import WeightedSVD

NAME = "layers.0.mlp.up_proj"


def factors() -> WeightedSVD:
    torch.manual_seed(0)
    # A slice and a transpose, as a decomposition returns them.
    left, right = torch.randn(8, 9)[:, :3], torch.randn(6, 3).T
    return WeightedSVD(
        left=left, values=torch.rand(3), right=right, energy=1 / 3, scale=1e-30 / 7, tokens=10**9 + 1, seconds=0.1
    )


def test_factors_come_back_exactly_or_their_damaged_file_is_named(tmp_path):
    folder, put = tmp_path / "a" / "b", factors()
    kept = SavedFactors(folder, {"seed": 0}).claim()
    assert NAME not in kept
    with pytest.raises(KeyError):
        kept[NAME]
    kept[NAME] = put
    again = SavedFactors(folder, {"seed": 0})
    assert list(again) == [NAME]
    torch.testing.assert_close(vars(again[NAME]), vars(put), rtol=0, atol=0)
    files = [each for (each, *_) in kinds(folder).values()]
    assert len(files) == 3
    for file in files:
        with damage(file), pytest.raises(UserError, match=re.escape(str(file))):
            SavedFactors(folder, {"seed": 0})[NAME]


def test_the_embedding_comes_back_for_the_weightings_that_it_serves(tmp_path):
    vectors, matrices = torch.rand(2, 9), torch.rand(2, 4, 4)
    full = TableMoments(
        counts=vectors[0],
        gradients=matrices[0],
        head_inputs=matrices[1],
        head_outputs=vectors[1],
        tokens=10**9 + 1,
    )
    folders = {weighting: SavedFactors(tmp_path, {}, weighting).claim() for weighting in ("activations", "gradients")}
    assert folders["gradients"].table is None
    folders["activations"].table = replace(full, gradients=None, head_outputs=None)
    assert folders["gradients"].table is None
    folders["gradients"].table = full
    for weighting, expected in (("gradients", full), ("activations", replace(full, gradients=None, head_outputs=None))):
        torch.testing.assert_close(vars(folders[weighting].table), vars(expected), rtol=0, atol=0)


def test_a_folder_of_another_measurement_or_of_something_else_is_refused(tmp_path):
    SavedFactors(tmp_path / "kept", {"seed": 0})
    SavedFactors(tmp_path / "kept", {"seed": 2}).claim()
    with pytest.raises(UserError, match="of another measurement: seed was 2 and is now 1"):
        SavedFactors(tmp_path / "kept", {"seed": 1})
    (tmp_path / "file").write_bytes(b"")
    for other in (tmp_path, tmp_path / "file"):
        with pytest.raises(UserError, match="is not empty and holds no statistics; choose another folder"):
            SavedFactors(other, {})


def test_what_a_kill_has_left_is_removed_and_what_is_being_written_is_not(tmp_path, monkeypatch):
    kept, during = SavedFactors(tmp_path, {}).claim(), []

    def save(tensors, path, words):
        own = path.parent
        dead = own.with_name(f"{own.name[:-13]}abcdefgh.part")  # nobody has locked it
        dead.mkdir()
        (dead / path.name).write_bytes(b"half")
        SavedFactors(tmp_path, {}).claim()
        during.extend(each.name for each in own.parent.iterdir() if each.is_dir())
        save_file(tensors, path, words)

    monkeypatch.setattr("llmdistill.students.start.calibration_folder.save_file", save)
    kept[NAME] = factors()
    assert len(during) == 1
    assert "abcdefgh" not in during[0]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["gradients", RECORD, "sums"]
    assert sorted(each.name for each in (tmp_path / "gradients").iterdir()) == [f"{NAME}.json", f"{NAME}.safetensors"]


def test_factors_that_are_there_after_a_kill_have_their_entry(tmp_path, monkeypatch):
    kept, write = SavedFactors(tmp_path, {}).claim(), os.replace

    def killed(part, file):
        if str(file).endswith(f"{NAME}.json"):
            raise KeyboardInterrupt
        write(part, file)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        kept[NAME] = factors()
    assert NAME not in SavedFactors(tmp_path, {}), "nothing would show that these factors are whole"
