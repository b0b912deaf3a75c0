"""Which student a run with train.keep_best keeps."""

import json
import shutil
from functools import partial

import pytest
from damage import flip

from llmdistill.artifacts import write_manifest
from llmdistill.errors import UserError
from llmdistill.training.callbacks import saving
from llmdistill.training.callbacks.best import BestStudent, read_best
from llmdistill.training.callbacks.validation import Validation

pytestmark = pytest.mark.usefixtures("cpu_world")


def keeper(folder, scores=None):
    """Keeps folders that contain the number of the save."""
    saved = []

    def save(target):
        saved.append(target)
        target.mkdir(parents=True)
        (target / "weights").write_text(str(len(saved)))

    metric, score = ("loss", None) if scores is None else ("ROUGE-L", partial(next, iter(scores)))
    return BestStudent(folder=folder, metric=metric, save=save, score=score)


def test_the_smallest_loss_is_kept_and_of_equal_ones_the_first(tmp_path):
    best = keeper(tmp_path)
    for step, loss in ((2, 1.5), (4, 1.25), (6, 1.25), (8, 1.3)):
        assert best.keep_if_best(step, loss) == {}
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-4"]
    assert best.move_to(tmp_path / "student") == {"step": 4, "metric": "loss", "value": 1.25, "student": "best/step-4"}
    assert (tmp_path / "student" / "weights").read_text() == "2"
    assert not (tmp_path / "best").exists()
    assert read_best(tmp_path)["step"] == 4  # the report of a run that was killed here still names the step


def test_the_largest_score_is_kept_whatever_the_losses_are(tmp_path):
    best = keeper(tmp_path, scores=[10.0, 30.0, 20.0])
    found = [best.keep_if_best(step, loss) for step, loss in ((1, 0.1), (2, 9.0), (3, 0.2))]
    assert found == [{"valid_score": score} for score in (10.0, 30.0, 20.0)]
    assert best.move_to(tmp_path / "student")["step"] == 2


def test_a_resumed_run_keeps_its_best_and_a_new_attempt_forgets_it(tmp_path):
    keeper(tmp_path).keep_if_best(5, 1.0)
    resumed = keeper(tmp_path)
    resumed.keep_if_best(5, 1.0)  # the step after the checkpoint is repeated
    assert (tmp_path / "best" / "step-5" / "weights").read_text() == "1"
    resumed.keep_if_best(6, 2.0)
    assert read_best(tmp_path)["step"] == 5
    resumed.check_resumed()
    resumed.keep_if_best(1, 7.0)
    assert read_best(tmp_path)["value"] == 7.0


def test_a_model_that_was_killed_while_it_was_saved_is_saved_again(tmp_path):
    best = keeper(tmp_path)
    best.keep_if_best(1, 2.0)
    (tmp_path / "best" / "step-2").mkdir()  # without a record
    best.keep_if_best(2, 1.0)
    assert (tmp_path / read_best(tmp_path)["student"] / "weights").read_text() == "2"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-2"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda student: (student.parents[1] / "best.json").unlink(), r"best\.json is missing"),
        (shutil.rmtree, "step-1 is missing"),
        (lambda student: (student / "weights").write_text("9"), "weights changed after"),
    ],
)
def test_a_damaged_best_student_is_not_taken(tmp_path, damage, said):
    best = keeper(tmp_path)
    best.keep_if_best(1, 2.0)
    write_manifest(tmp_path / "best" / "step-1")
    damage(tmp_path / "best" / "step-1")
    with pytest.raises(UserError, match=rf"{said}.*: the best student is lost"):
        best.move_to(tmp_path / "student")
    assert not (tmp_path / "student").exists()


def test_a_resumed_run_without_its_best_goes_on_and_says_so(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "valid_loss": 1.0}\n')
    keeper(tmp_path).check_resumed(1)
    assert capsys.readouterr().err == ""
    keeper(tmp_path).check_resumed(3)
    said = "".join(capsys.readouterr().err.replace("│", "").split())
    assert "sothebeststudentuptostep3islost" in said


LOSSES = {1: 1.0, 2: 3.0, 3: 2.0, 4: 1.5}
"""The validation loss after each step: the best student is that of a step whose checkpoint goes away."""
KEEPS_BEST = ("--train.steps", "4", "--train.keep_best", "loss", "--train.validate_every", "1")
KEEPS_BEST += ("--train.keep_checkpoints", "2", "--scoring.models", "[]")


def names(folder):
    return {each.name for each in folder.iterdir()}


def test_the_best_student_outlives_its_checkpoint_and_a_lost_one_is_said_at_once(tmp_path, trains, monkeypatch):
    run, killed, save = tmp_path / "run", tmp_path / "killed", saving.save_checkpoint

    def save_and_copy(engine, folder, step, *more, **named):
        save(engine, folder, step, *more, **named)
        if step == 3:
            shutil.copytree(folder, killed)

    monkeypatch.setattr(Validation, "loss", lambda self: LOSSES.get(self.trainer.engine.global_steps, 9.0))
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", save_and_copy)
        assert trains(run, *KEEPS_BEST)[0] == 0
    assert names(killed / "checkpoints") == {"step-2", "step-3"}
    best = killed / "best" / "step-1" / "model.safetensors"
    whole = best.read_bytes()
    with flip(best, -1):
        code, said = trains(killed, *KEEPS_BEST)
    assert code == 2
    assert f"error: {best} changed after it was written" in said
    assert f"the best student so far is lost; remove {killed}/best.json, and the next validation counts as" in said
    assert names(killed / "checkpoints") == {"step-2", "step-3"}, "nothing was trained"
    assert trains(killed, *KEEPS_BEST)[0] == 0
    for folder in (run, killed):
        assert (folder / "student" / "model.safetensors").read_bytes() == whole
        assert json.loads((folder / "metrics.json").read_text())["kept"]["step"] == 1
