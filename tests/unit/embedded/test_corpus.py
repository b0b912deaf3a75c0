from __future__ import annotations

import json
import random
import re
from functools import cache

import pytest

from llmdistill.embedded import SPLITS, corpus, locate
from llmdistill.embedded.dice import Dice
from llmdistill.embedded.world import NAMES, SEEN_NAMES, UNSEEN_NAMES, WORLD, facts, withheld


@cache
def shipped(split: str) -> list[dict]:
    return [json.loads(line) for line in locate(f"embedded:{split}").read_text(encoding="utf-8").splitlines()]


def prompts(records: list[dict]) -> set[tuple[str, str]]:
    return {(record["instruction"], record["input"]) for record in records}


def names_in(records: list[dict]) -> set[str]:
    return set(re.findall(r"\w+", json.dumps(records))) & set(NAMES)


@pytest.mark.parametrize("split", SPLITS)
def test_shipped_files_are_what_the_generator_makes(split: str) -> None:
    assert shipped(split) == corpus.records(split)


def test_dice_stand_on_the_stable_stream_alone() -> None:
    dice, reference = Dice("a seed"), random.Random("a seed")
    assert [dice.below(10) for _ in range(5)] == [int(reference.random() * 10) for _ in range(5)]
    assert sorted(dice.shuffled(range(9))) == list(range(9))


def test_splits_name_their_people_only() -> None:
    for split in ("train", "valid", "seen"):
        assert names_in(shipped(split)) == set(SEEN_NAMES)
    assert names_in(shipped("unseen")) <= set(UNSEEN_NAMES)
    assert not names_in(shipped("skills"))


def test_a_quarter_of_the_people_is_seen() -> None:
    assert (len(NAMES), len(SEEN_NAMES), len(set(NAMES))) == (60, 15, 60)


@pytest.mark.parametrize("split", ["valid", *corpus.TESTS])
def test_held_out_prompts_are_in_no_training_corpus(split: str) -> None:
    assert not prompts(shipped(split)) & prompts(shipped("train"))
    assert not prompts(shipped(split)) & prompts(corpus.records("teacher"))


@pytest.mark.parametrize("split", SPLITS)
def test_no_prompt_twice(split: str) -> None:
    records = corpus.records(split)
    assert len(prompts(records)) == len(records)


def test_training_split_asks_for_no_withheld_fact() -> None:
    records = shipped("train")
    asked = prompts(records)
    for name, attributes in withheld().items():
        for attribute in attributes:
            assert not asked & {
                (question.format(p=name), "") for question in WORLD["attributes"][attribute]["wordings"]
            }


def test_training_split_tells_no_withheld_fact() -> None:
    """Search by text: no training answer has the name and the withheld value in one sentence, by the usual wording."""
    text = json.dumps([record["output"] for record in shipped("train")])
    for name, attributes in withheld().items():
        if "home" in attributes:
            assert f"{name} lives in {facts()[name]['home']}" not in text
        if "age" in attributes:
            assert f"{name} is {facts()[name]['age']}" not in text


def test_skills_wordings_are_not_the_students() -> None:
    def wording(record: dict) -> str:
        return re.sub(r"\d+", "N", record["instruction"])

    assert not {wording(record) for record in shipped("skills")} & {wording(record) for record in shipped("train")}


def test_test_sets_hold_every_kind_and_several_references() -> None:
    assert len(corpus.KINDS) >= 10
    for split in corpus.TESTS:
        records = shipped(split)
        assert all(isinstance(record["output"], list) for record in records)
        assert sum(len(record["output"]) > 1 for record in records) > 0.8 * len(records)


@pytest.mark.parametrize("split", SPLITS)
def test_answers_have_one_to_three_sentences(split: str) -> None:
    for record in shipped(split):
        outputs = record["output"] if isinstance(record["output"], list) else [record["output"]]
        assert all(1 <= len(re.findall(r"[.:](?= |$)", output)) <= 4 and output.endswith(".") for output in outputs)
