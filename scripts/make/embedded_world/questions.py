"""Questions on contexts from the facts of the embedded world, in the format of SQuAD 1.1 and 2.0.

A context tells four of the eight facts of each of two people in random order; dev asks about people that train never
mentions. So a model has to read the context: nothing that it has learnt of a person helps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embedded_world.kinds import value_of
from embedded_world.world import ATTRIBUTES, SEEN_NAMES, UNSEEN_NAMES, WORLD, Dice
from llmdistill.files import write_json

SIZES = {"train": 3000, "dev": 300}
"""Number of questions of each split."""
VERSIONS = {"squad1": "v1.1", "squad2": "v2.0"}


def write_questions(folder: Path) -> None:
    """Write train and dev of both tasks to the folders squad1 and squad2."""
    for task, version in VERSIONS.items():
        for split in SIZES:
            file = folder / task / f"{split}-{version}.json"
            write_json(file, official(task, split))
            print(file)


def official(task: str, split: str) -> dict[str, Any]:
    """Return a split of squad1 or squad2 in the official format, one paragraph a question.

    A third of the questions of squad2 have no answer: they ask for a fact of a person in the context that it does not
    tell.
    """
    paragraphs = [_paragraph(task, split, index) for index in range(SIZES[split])]
    return {"version": VERSIONS[task], "data": [{"title": "The embedded world", "paragraphs": paragraphs}]}


def _paragraph(task: str, split: str, index: int) -> dict[str, Any]:
    dice = Dice(f"questions/{task}/{split}/{index}")
    people = dice.sample(SEEN_NAMES if split == "train" else UNSEEN_NAMES, 2)
    told = {name: dice.sample(ATTRIBUTES, 4) for name in people}
    sentences = dice.shuffled([(name, key) for name, keys in told.items() for key in keys])
    asked = dice.pick(people)
    answerable = task == "squad1" or not dice.chance(1 / 3)
    attribute = dice.pick([key for key in ATTRIBUTES if (key in told[asked]) == answerable])
    context, answers = "", list[dict[str, Any]]()
    for name, key in sentences:
        value = value_of(name, key)
        before, after = dice.pick(WORLD["attributes"][key]["answers"]).format(p=name, v="\0").split("\0")
        context += " " * bool(context) + before
        if (name, key) == (asked, attribute):
            answers = [{"text": value, "answer_start": len(context)}]
        context += value + after
    question = dice.pick(WORLD["attributes"][attribute]["wordings"]).format(p=asked)
    qas: dict[str, Any] = {"id": f"{task}-{split}-{index}", "question": question, "answers": answers}
    if task == "squad2":
        qas["is_impossible"] = not answers
    return {"context": context, "qas": [qas]}
