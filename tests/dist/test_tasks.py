"""Fine-tuning on a task as an ordinary run: adapters, a sharded teacher, two ranks, and going on from a checkpoint."""

import json

import pytest
from glue_tasks import write_task

from support import interrupted_copy, largest_difference, log_rows

SETTINGS = "--data.max_length 32 --train.epochs 2 --train.learning_rate 3e-3 --train.save_every 5"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_task(folder, "RTE", {"train": 40, "dev": 13})
    return folder


@pytest.fixture(scope="module")
def encoder(tiny_teacher):
    return tiny_teacher


@pytest.fixture(scope="module")
def teacher(finetune, tmp_path_factory):
    """A run of the labels alone."""
    return finetune(tmp_path_factory.mktemp("run") / "teacher", "--train.epochs", "6")


def test_the_labels_are_learned_and_scored(teacher):
    metrics = json.loads((teacher / "metrics.json").read_text())
    assert list(metrics["student"]["dev"]) == ["RTE"]
    rows = [line.split("\t") for line in (teacher / "predictions/student/dev.tsv").read_text().splitlines()[1:]]
    right = sum(row[1] == row[2] for row in rows)
    assert metrics["student"]["score"] == pytest.approx(100 * right / len(rows))
    assert metrics["student"]["score"] > metrics["student"]["chance"]
    log = log_rows(teacher)
    assert [row["step"] for row in log] == [8, 16, 24, 30], "four lines: six epochs of five steps"
    assert "| RTE accuracy |" in (teacher / "report.md").read_text()


def test_adapters_learn_from_a_sharded_teacher_on_two_ranks_as_on_one(finetune, teacher, tmp_path):
    learns = ("--method", "kd", "--teacher.model", str(teacher / "student"), "--student.lora.rank", "2")
    one = finetune(tmp_path / "one", *learns)
    two = finetune(tmp_path / "two", *learns, "--teacher.sharding", "zero3", ranks=2)
    assert largest_difference(one, two) < 1e-4
    dev = [json.loads((run / "metrics.json").read_text())["teacher"]["dev"] for run in (one, two)]
    assert dev[0] == dev[1]


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(finetune, teacher, tmp_path):
    stopped = interrupted_copy(teacher, tmp_path / "stopped")
    finetune(stopped, "--train.epochs", "6")
    assert largest_difference(teacher, stopped) == 0
    answers = [(run / "predictions/student/dev.tsv").read_bytes() for run in (teacher, stopped)]
    assert answers[0] == answers[1]
