from __future__ import annotations

import json
from functools import cache

import pytest

from llmdistill.embedded import SPLITS, corpus, locate
from llmdistill.embedded.world import facts, withheld


@cache
def shipped(split: str) -> list[dict]:
    return [json.loads(line) for line in locate(f"embedded:{split}").read_text(encoding="utf-8").splitlines()]


def prompts(records: list[dict]) -> set[tuple[str, str]]:
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
