"""The invented world of `data/world.yaml`: sixty people with eight facts each, their towns, jobs, pets and dishes."""

from __future__ import annotations

from functools import cache
from typing import Any

import yaml

from llmdistill.embedded import FOLDER
from llmdistill.embedded.dice import Dice

WORLD: dict[str, Any] = yaml.safe_load((FOLDER / "data" / "world.yaml").read_text(encoding="utf-8"))

NAMES: list[str] = WORLD["names"]
SEEN_NAMES = NAMES[::4]
"""The people in the student's training split; it never mentions the other people."""
UNSEEN_NAMES = [name for name in NAMES if name not in SEEN_NAMES]
ATTRIBUTES: tuple[str, ...] = tuple(WORLD["attributes"])


@cache
def facts() -> dict[str, dict[str, str]]:
    """Name -> attribute -> value, for all people."""
    values = {
        "home": list(WORLD["towns"]),
        "job": list(WORLD["jobs"]),
        "pet": list(WORLD["pets"]),
        "food": list(WORLD["dishes"]),
        "hobby": WORLD["hobbies"],
        "age": [str(age) for age in range(20, 80)],
        "colour": WORLD["colours"],
        "month": WORLD["months"],
    }
    return {name: {key: Dice(f"fact/{name}/{key}").pick(values[key]) for key in ATTRIBUTES} for name in NAMES}


@cache
def withheld() -> dict[str, tuple[str, ...]]:
    """Name of a seen person -> the three of eight attributes that the student's training split does not contain."""
    return {
        name: tuple(ATTRIBUTES[(index + shift) % len(ATTRIBUTES)] for shift in (0, 3, 5))
        for index, name in enumerate(SEEN_NAMES)
    }
