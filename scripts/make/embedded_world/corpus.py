"""The splits of the embedded corpus, as lists of rows and as JSONL files.

train  the student's training split: a quarter of the people, and skills in their common wordings
valid  validation: rows of the same kinds as in train
seen   test: the same people as in train, with new combinations and questions on facts that train does not contain
unseen test: people that train never mentions; the teacher's corpus contains them
skills test: no people; skills and knowledge in reserved wordings, which the teacher's corpus contains
The teacher's corpus covers the whole world and all wordings; it is generated and not in the package. No prompt of a
test set or of valid occurs in any training corpus.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from embedded_world.kinds import PEOPLE_KINDS, SKILL_KINDS, TOPIC_KINDS, Row, Scope
from embedded_world.world import ATTRIBUTES, NAMES, SEEN_NAMES, UNSEEN_NAMES, Dice, withheld
from llmdistill.embedded import SPLITS

OTHER_KINDS = SKILL_KINDS | TOPIC_KINDS
KINDS = PEOPLE_KINDS | OTHER_KINDS
WEIGHTS = {"fact": 5, "two_facts": 3, "profile": 3, "older": 2, "same": 2, "which": 2, "check": 2, "reading": 2}
"""Relative frequencies of the kinds of row about people; a kind that is not listed has the weight 1."""
USUAL_SHARE = 0.8
"""Share of training rows whose output is the usual answer; the other rows have another correct answer."""

SIZES = {"train": 2000, "valid": 100, "seen": 80, "unseen": 80, "skills": 80, "teacher": 22000}
"""Number of rows of each split; the teacher's corpus contains these rows in addition to the training split."""
TESTS = ("seen", "unseen", "skills")


def _scope(
    names: list[str], left_out: dict[str, tuple[str, ...]], *, reserved: bool = False, both: bool = False
) -> Scope:
    attributes = {name: tuple(key for key in ATTRIBUTES if key not in left_out.get(name, ())) for name in names}
    return Scope(tuple(names), attributes, reserved, both)


def _kind(split: str, index: int) -> str:
    """The kind of row `index`: test sets cycle through the kinds, other splits draw a kind at random."""
    people = [kind for kind in PEOPLE_KINDS for _ in range(WEIGHTS[kind])]
    if split == "skills":
        return list(OTHER_KINDS)[index % len(OTHER_KINDS)]
    if split in TESTS:
        return people[index % len(people)]
    dice = Dice(f"{split}/{index}/kind")
    share = 0.55 if split == "teacher" else 0.6
    return dice.pick(people) if dice.chance(share) else dice.pick(list(OTHER_KINDS))


def _rows(split: str, taken: set[tuple[str, str]]) -> list[Row]:
    """The rows of one split, without the prompts in `taken`; only the teacher's corpus repeats prompts."""
    scope = {
        "train": _scope(SEEN_NAMES, withheld()),
        "valid": _scope(SEEN_NAMES, withheld()),
        "seen": _scope(SEEN_NAMES, {}),
        "unseen": _scope(UNSEEN_NAMES, {}),
        "skills": _scope(NAMES, {}, reserved=True),
        "teacher": _scope(NAMES, {}, both=True),
    }[split]
    rows: list[Row] = []
    own = set(taken)
    for index in range(SIZES[split]):
        kind = _kind(split, index)
        attempt = 0
        while True:
            row = KINDS[kind](Dice(f"{split}/{index}/{attempt}"), scope)
            if (row.instruction, row.input) not in own:
                break
            attempt += 1
            if attempt > 40:  # few new prompts are left for this kind: take a kind with many
                kind = "profile" if kind in PEOPLE_KINDS else "sort_words"
        if split != "teacher":
            own.add((row.instruction, row.input))
        rows.append(row)
    return rows


@cache
def splits() -> dict[str, list[Row]]:
    """Split name -> rows; "teacher" is the teacher's corpus, which contains the training split."""
    made: dict[str, list[Row]] = {}
    held_out: set[tuple[str, str]] = set()
    for split in ("seen", "unseen", "skills", "valid"):
        made[split] = _rows(split, held_out)
        held_out |= {(row.instruction, row.input) for row in made[split]}
    made["train"] = _rows("train", held_out)
    made["teacher"] = made["train"] + _rows("teacher", held_out)
    return made


def training_output(row: Row, index: int) -> str:
    """The answer that a training split contains for its row `index`."""
    dice = Dice(f"output/{index}/{row.instruction}")
    return row.outputs[0] if dice.chance(USUAL_SHARE) else dice.pick(row.outputs)


def records(split: str) -> list[dict[str, str | list[str]]]:
    """The JSONL records of a split: one output in training splits, all correct answers in the other splits."""
    return [
        {
            "instruction": row.instruction,
            "input": row.input,
            "output": training_output(row, index) if split in ("train", "teacher") else list(row.outputs),
        }
        for index, row in enumerate(splits()[split])
    ]


def write(folder: Path) -> None:
    """Write the splits of the package to `folder`, one JSONL file per split."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records(split)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")
