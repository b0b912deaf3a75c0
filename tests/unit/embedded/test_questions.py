"""Questions on the facts of the embedded world: every answer stands in its context, and only there."""

import re

import pytest

from llmdistill.config.data import TaskConfig
from llmdistill.embedded.questions import SIZES, official, write_questions
from llmdistill.embedded.world import NAMES, SEEN_NAMES, WORLD, facts
from llmdistill.tasks.squad_files import read_files


def rows(task, split):
    for paragraph in official(task, split)["data"][0]["paragraphs"]:
        (question,) = paragraph["qas"]
        yield paragraph["context"], question


def attribute_of(question, name):
    """The attribute that a question asks for, by its wording."""
    wordings = {key: [each.format(p=name) for each in texts["wordings"]] for key, texts in WORLD["attributes"].items()}
    return next(key for key, known in wordings.items() if question in known)


@pytest.mark.parametrize(("task", "split"), [("squad1", "dev"), ("squad2", "train")])
def test_the_answer_is_the_fact_and_no_answer_is_no_sentence(task, split):
    for context, question in rows(task, split):
        (name,) = (each for each in NAMES if re.search(rf"\b{each}\b", question["question"]))
        assert (name in SEEN_NAMES) == (split == "train")
        key = attribute_of(question["question"], name)
        value = facts()[name][key]
        if question["answers"]:
            (answer,) = question["answers"]
            assert answer["text"].removeprefix("an ").removeprefix("a ") == value
            assert context[answer["answer_start"] :].startswith(answer["text"])
            start = context.rfind(". ", 0, answer["answer_start"]) + 1
            assert name in context[start : context.find(".", answer["answer_start"])]
        else:
            assert task == "squad2"
            assert question["is_impossible"]
            told = [each for each in context.split(". ") if name in each and re.search(rf"\b{value}\b", each)]
            assert told == []
            assert name in context


def test_the_files_are_read_as_official_ones(tmp_path):
    assert len(write_questions(tmp_path)) == 4
    one, two = (read_files(task, TaskConfig(name=task, dir=str(tmp_path))) for task in ("squad1", "squad2"))
    assert len(one.train) == len(two.train) == SIZES["train"]
    assert one.skipped == two.skipped == []
    unanswered = sum(not each.answers for each in two.train) / len(two.train)
    assert 0.28 < unanswered < 0.38
