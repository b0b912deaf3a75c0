"""What each task says of its models' scores."""

from __future__ import annotations

import pytest

from llmdistill.config import DataConfig, GenerationConfig, RunConfig
from llmdistill.data.instruct import Limits
from llmdistill.data.pairs import EncodedPair
from llmdistill.tasks.glue import GlueData
from llmdistill.tasks.instructions import InstructionData
from llmdistill.tasks.text import TextData
from llmdistill.tasks.windows import TextTests

NO_TEXTS = TextTests(texts={}, settings=GenerationConfig(), models=None)


@pytest.fixture
def instructions():
    return InstructionData(
        settings=DataConfig(),
        limits=Limits(),
        texts=NO_TEXTS,
        scoring=GenerationConfig(decoding="greedy"),
        trains=True,
        tokenizer=None,
        teachers_tokenizer=None,
        written_by=None,
        tests={"seen": [], "unseen": []},
        report="",
        data_warnings=["another model wrote the answers"],
    )


@pytest.fixture
def text():
    settings = DataConfig(kind="text", train="a.txt")
    kind = {"causal": True, "pairs": False, "next_sentence": False}
    own = {"tokenizer": None, "teachers_tokenizer": None, "texts": NO_TEXTS}
    return TextData(settings=settings, seed=0, trains=True, report="", **own, **kind)


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


def test_without_a_validation_text_there_is_no_loss_to_show(text):
    sizes = {"teacher_params": 200, "student_params": 50}
    results = text.results({}, [{"step": 10, "loss": 2.0}], sizes)
    assert [results[name]["valid_loss"] for name in ("teacher", "untrained", "student")] == [None, None, None]
    assert "student" not in text.results({}, [], sizes)


@pytest.mark.parametrize(("size", "batch", "steps"), [(10, 4, 3), (8, 4, 2), (3, 4, 1)])
def test_the_steps_of_an_epoch_of_glue_learn_each_example(size, batch, steps):
    rows = [EncodedPair([1], None, 0, number) for number in range(size)]
    data = GlueData(
        config=RunConfig(ds_config=""),
        key="rte",
        tokenizer=None,
        encoded={"train": rows},
        meta={"labels": {}},
        text=str,
        digest="",
        report="",
    )
    assert data.num_steps(1, batch) == steps
    assert data.num_steps(3, batch) == 3 * steps, "each epoch is rounded up"
