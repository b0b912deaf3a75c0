"""Which student a run with train.keep_best keeps."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from llmdistill.artifacts import MANIFEST, write_manifest
from llmdistill.errors import UserError
from llmdistill.run.best import BestStudent, read_best
from llmdistill.runtime.distributed import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


def keeper(folder, scores=None):
    """Keeps folders that contain the number of the save."""
    saved = []

    def save(target):
        saved.append(target)
        target.mkdir(parents=True)
        (target / "weights").write_text(str(len(saved)))

    values = None if scores is None else iter(scores)
    score = None if values is None else lambda: next(values)
    return BestStudent(
        folder=folder, metric="loss" if scores is None else "ROUGE-L", world=WORLD, save=save, score=score
    )


def test_the_smallest_loss_is_kept_and_of_equal_ones_the_first(tmp_path):
    best = keeper(tmp_path)
    for step, loss in ((2, 1.5), (4, 1.25), (6, 1.25), (8, 1.3)):
        assert best.validated(step, loss) == {}
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-4"]
    assert best.take(tmp_path / "student") == {"step": 4, "metric": "loss", "value": 1.25, "student": "best/step-4"}
    assert (tmp_path / "student" / "weights").read_text() == "2"
    assert not (tmp_path / "best").exists()
    assert read_best(tmp_path)["step"] == 4  # the report of a run that was killed here still names the step


def test_the_largest_score_is_kept_whatever_the_losses_are(tmp_path):
    best = keeper(tmp_path, scores=[10.0, 30.0, 20.0])
    assert [best.validated(step, loss) for step, loss in ((1, 0.1), (2, 9.0), (3, 0.2))] == [
        {"valid_score": 10.0},
        {"valid_score": 30.0},
        {"valid_score": 20.0},
    ]
    assert best.take(tmp_path / "student")["step"] == 2


def test_a_resumed_run_keeps_its_best_and_a_new_attempt_forgets_it(tmp_path):
    keeper(tmp_path).validated(5, 1.0)
    resumed = keeper(tmp_path)
    resumed.validated(5, 1.0)  # the step after the checkpoint is repeated
    assert (tmp_path / "best" / "step-5" / "weights").read_text() == "1"
    resumed.validated(6, 2.0)
    assert read_best(tmp_path)["step"] == 5
    resumed.begin()
    resumed.validated(1, 7.0)
    assert read_best(tmp_path)["value"] == 7.0


def test_a_model_that_was_killed_while_it_was_saved_is_saved_again(tmp_path):
    best = keeper(tmp_path)
    best.validated(1, 2.0)
    (tmp_path / "best" / "step-2").mkdir()  # without a record
    best.validated(2, 1.0)
    assert (tmp_path / read_best(tmp_path)["student"] / "weights").read_text() == "2"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-2"]


def test_a_damaged_record_is_one_sentence(tmp_path):
    (tmp_path / "best.json").write_text("{")
    with pytest.raises(UserError, match=r"best\.json: not valid JSON; remove the file"):
        keeper(tmp_path).validated(1, 2.0)
    (tmp_path / "best.json").write_text(json.dumps({"value": 1.0, "metric": "loss", "student": "best/gone", "step": 1}))
    keeper(tmp_path).validated(3, 2.0)  # without its folder it is no longer there
    assert read_best(tmp_path)["step"] == 3


@pytest.mark.parametrize("damage", ["record", "missing", "weights", "manifest"])
def test_a_damaged_best_student_is_not_taken(tmp_path, damage):
    best = keeper(tmp_path)
    best.validated(1, 2.0)
    student = tmp_path / "best" / "step-1"
    write_manifest(student)
    if damage == "record":
        (tmp_path / "best.json").unlink()
    elif damage == "missing":
        shutil.rmtree(student)
    else:
        (student / ("weights" if damage == "weights" else MANIFEST)).write_text("9")
    said = {"record": r"best\.json is missing", "missing": "step-1 is missing", "weights": "weights changed after"}
    with pytest.raises(UserError, match=rf"{said.get(damage, 'not a JSON object')}.*: the best student is lost"):
        best.take(tmp_path / "student")
    assert not (tmp_path / "student").exists()
