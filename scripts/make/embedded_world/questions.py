"""Questions on contexts from the facts of the embedded world, in the format of SQuAD 1.1 and 2.0.

A context tells facts of two people in random order; dev asks about people that train never mentions. So a model has
to read the context: nothing that it has learnt of a person helps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from embedded_world.kinds import value_of
from embedded_world.world import ATTRIBUTES, SEEN_NAMES, UNSEEN_NAMES, WORLD, Dice
from llmdistill.files import write_json

SIZES = {"train": 3000, "dev": 300}
"""Number of questions of each split."""
_PEOPLE, _TOLD = 2, 4
"""People in a context, and the facts that it tells of each of the eight."""
_FILES = {"squad1": "{}-v1.1.json", "squad2": "{}-v2.0.json"}


def write_questions(folder: Path) -> list[Path]:
    """Write train and dev of both tasks to the folders squad1 and squad2, and return the files."""
    files = []
    for task, name in _FILES.items():
        for split in SIZES:
            file = folder / task / name.format(split)
            write_json(file, official(task, split))
            files.append(file)
    return files


def official(task: str, split: str) -> dict[str, Any]:
    """Return a split of squad1 or squad2 in the official format, one paragraph a question.

    A third of the questions of squad2 have no answer: they ask for a fact of a person in the context that it does not
    tell.
    """
    paragraphs = [_paragraph(task, split, index) for index in range(SIZES[split])]
    return {
        "version": _FILES[task].partition("-")[2].removesuffix(".json"),
        "data": [{"title": "The embedded world", "paragraphs": paragraphs}],
    }


def _paragraph(task: str, split: str, index: int) -> dict[str, Any]:
    dice = Dice(f"questions/{task}/{split}/{index}")
    people = dice.sample(SEEN_NAMES if split == "train" else UNSEEN_NAMES, _PEOPLE)
    told = {name: dice.sample(ATTRIBUTES, _TOLD) for name in people}
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
