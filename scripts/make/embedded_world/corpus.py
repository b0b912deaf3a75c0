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
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path

from embedded_world.kinds import PEOPLE_KINDS, SKILL_KINDS, TOPIC_KINDS, Kind, Scope, profile, sort_words
from embedded_world.world import ATTRIBUTES, NAMES, UNSEEN_NAMES, Dice, withheld
from llmdistill.data.examples import Example
from llmdistill.embedded import SPLITS
from llmdistill.files import write_text

PEOPLE = [kind for kind, weight in PEOPLE_KINDS.items() for _ in range(weight)]
OTHER = [*SKILL_KINDS, *TOPIC_KINDS]
USUAL_SHARE = 0.8
"""Share of training rows whose output is the usual answer; the other rows have another correct answer."""

SIZES = {"train": 2000, "valid": 100, "seen": 80, "unseen": 80, "skills": 80, "teacher": 22000}
"""Number of rows of each split; the teacher's corpus contains these rows in addition to the training split."""
TESTS = ("seen", "unseen", "skills")

_TOLD = {name: [key for key in ATTRIBUTES if key not in keys] for name, keys in withheld().items()}
SCOPES = {
    "train": Scope(_TOLD),
    "valid": Scope(_TOLD),
    "seen": Scope(dict.fromkeys(withheld(), ATTRIBUTES)),
    "unseen": Scope(dict.fromkeys(UNSEEN_NAMES, ATTRIBUTES)),
    "skills": Scope({}, ("reserved",)),
    "teacher": Scope(dict.fromkeys(NAMES, ATTRIBUTES), ("wordings", "reserved")),
}


def _kind(split: str, index: int) -> Kind:
    """The kind of row `index`: test sets cycle through the kinds, other splits draw a kind at random."""
    if split in TESTS:
        kinds = OTHER if split == "skills" else PEOPLE
        return kinds[index % len(kinds)]
    dice = Dice(f"{split}/{index}/kind")
    share = 0.55 if split == "teacher" else 0.6
    return dice.pick(PEOPLE) if dice.chance(share) else dice.pick(OTHER)


def _rows(split: str, taken: set[tuple[str, str]]) -> list[Example]:
    """The rows of one split, without the prompts in `taken`; only the teacher's corpus repeats prompts."""
    rows: list[Example] = []
    own = set(taken)
    for index in range(SIZES[split]):
        kind = _kind(split, index)
        for attempt in count():
            if attempt > 40:  # few new prompts are left for this kind: take a kind with many
                kind = profile if kind in PEOPLE_KINDS else sort_words
            row = kind(Dice(f"{split}/{index}/{attempt}"), SCOPES[split])
            if (row.instruction, row.input) not in own:
                break
        if split != "teacher":
            own.add((row.instruction, row.input))
        rows.append(row)
    return rows


def _answered(row: Example, index: int) -> Example:
    """The row `index` of a training split, which has one of the correct answers."""
    dice = Dice(f"output/{index}/{row.instruction}")
    return replace(row, outputs=(row.outputs[0] if dice.chance(USUAL_SHARE) else dice.pick(row.outputs),))


@cache
def splits() -> dict[str, list[Example]]:
    """Split name -> rows; "teacher" is the teacher's corpus, which contains the training split."""
    made: dict[str, list[Example]] = {}
    held_out: set[tuple[str, str]] = set()
    for split in ("seen", "unseen", "skills", "valid"):
        made[split] = _rows(split, held_out)
        held_out |= {(row.instruction, row.input) for row in made[split]}
    rows = _rows("train", held_out) + _rows("teacher", held_out)
    made["teacher"] = [_answered(row, index) for index, row in enumerate(rows)]
    made["train"] = made["teacher"][: SIZES["train"]]
    return made


def records(split: str) -> list[dict[str, str | list[str]]]:
    """The JSONL records of a split: one output in training splits, all correct answers in the other splits."""
    return [
        {
            "instruction": row.instruction,
            "input": row.input,
            "output": row.outputs[0] if split in ("train", "teacher") else list(row.outputs),
        }
        for row in splits()[split]
    ]


def write(folder: Path) -> None:
    """Write the splits of the package to `folder`, one JSONL file per split."""
    for split in SPLITS:
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records(split)]
        write_text(folder / f"{split}.jsonl", "".join(lines))
