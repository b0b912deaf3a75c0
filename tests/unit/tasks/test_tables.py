"""What each task says of its models' scores."""

import pytest

from llmdistill.config import DataConfig, GenerationConfig, RunConfig, TaskConfig
from llmdistill.data.pairs import EncodedPair
from llmdistill.tasks.glue import Glue
from llmdistill.tasks.instructions import Instructions
from llmdistill.tasks.text import Text
from llmdistill.tasks.windows import TextTests

NO_TEXTS = TextTests(texts={}, settings=GenerationConfig(), models=None)


@pytest.fixture
def instructions():
    task = Instructions(RunConfig(ds_config="", scoring=GenerationConfig(decoding="greedy")))
    tests, warnings = {"seen": [], "unseen": []}, ["another model wrote the answers"]
    return task.having(texts=NO_TEXTS, tests=tests, data_warnings=warnings)


@pytest.fixture
def text():
    task = Text(RunConfig(ds_config="", data=DataConfig(kind="text", train="a.txt")))
    return task.having(texts=NO_TEXTS)


def test_a_teacher_at_chance_is_warned_of(instructions):
    good = {"valid": {"rougeL": 50.0, "chance": 12.0, "above_chance": True}}
    bad = {"valid": {"rougeL": 12.5, "chance": 12.0, "above_chance": False}}
    known = ["another model wrote the answers"]
    assert instructions.warnings(None) == instructions.warnings({}) == instructions.warnings(good) == known
    first, warning = instructions.warnings(bad)
    assert first == known[0]
    assert "at chance" in warning
    assert "12.5" in warning


def test_rouge_of_each_set_is_a_column(instructions):
    table = instructions.table({"student": {"rougeL": {"seen": 97.34, "unseen": 48.65}}})
    assert list(table.columns) == ["seen", "unseen"]
    assert table.rows == {"student": ["97.3", "48.6"]}
    assert "greedy" in table.legend


def test_a_text_shows_its_validation_loss_before_and_after(text):
    sizes = {"teacher_params": 200, "student_params": 50}
    log = [{"step": 0, "valid_loss": 3.5}, {"step": 10, "valid_loss": 1.75}, {"step": 20, "valid_loss": 1.25}]
    results = text.results({}, log, sizes)
    assert [results[name]["valid_loss"] for name in ("teacher", "untrained", "student")] == [None, 3.5, 1.25]
    assert text.table(results).rows == {"teacher": [""], "untrained": ["3.5000"], "student": ["1.2500"]}


def test_the_steps_of_an_epoch_of_glue_learn_each_example():
    rows = [EncodedPair([1], None, 0, number) for number in range(10)]
    task = Glue(RunConfig(ds_config="", data=DataConfig(kind="task", task=TaskConfig(name="rte"))))
    data = task.having(encoded={"train": rows})
    assert data.num_steps(1, 4) == 3
    assert not hasattr(task, "encoded"), "the examples are those of the copy, for one pair of models"
    assert data.num_steps(3, 4) == 9, "each epoch is rounded up"
