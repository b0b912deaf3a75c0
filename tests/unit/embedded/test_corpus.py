from __future__ import annotations

import json
import re
from functools import cache

import pytest

from llmdistill.embedded import SPLITS, corpus, locate
from llmdistill.embedded.world import NAMES, SEEN_NAMES, UNSEEN_NAMES, facts, withheld


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


def test_splits_name_their_people_only() -> None:
    assert names_in(shipped("train")) == names_in(shipped("valid")) == names_in(shipped("seen")) == set(SEEN_NAMES)
    assert names_in(shipped("unseen")) <= set(UNSEEN_NAMES)
    assert not names_in(shipped("skills"))


def test_held_out_prompts_are_in_no_training_corpus() -> None:
    learned = prompts(shipped("train")) | prompts(corpus.records("teacher"))
    for split in ("valid", *corpus.TESTS):
        assert not prompts(shipped(split)) & learned


def test_training_split_tells_no_withheld_fact() -> None:
    """Search by text: no training answer has the name and the withheld value in one sentence, by the usual wording."""
    text = json.dumps([record["output"] for record in shipped("train")])
    for name, attributes in withheld().items():
        told = {"home": f"{name} lives in {facts()[name]['home']}", "age": f"{name} is {facts()[name]['age']}"}
        assert not any(told[each] in text for each in set(attributes) & told.keys())


def test_skills_wordings_are_not_the_students() -> None:
    def wording(record: dict) -> str:
        return re.sub(r"\d+", "N", record["instruction"])

    assert not {wording(record) for record in shipped("skills")} & {wording(record) for record in shipped("train")}
