"""Types of the corpus: one instruction (Row), and the people, facts and wordings that a split may use (Scope)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmdistill.embedded.dice import Dice


@dataclass(frozen=True)
class Row:
    """One instruction with all its correct answers; the first answer is the usual one."""

    instruction: str
    input: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """The people of a split, the facts about them that it may use, and whether it uses the reserved wordings."""

    names: tuple[str, ...]
    attributes: Mapping[str, tuple[str, ...]]
    """Name -> the attributes that questions and answers may use."""
    reserved: bool
    """Use only the reserved wordings, the second set of wordings for instructions without people."""
    both: bool = False
    """Use both sets of wordings."""


def with_article(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def choose_wording(dice: Dice, scope: Scope, common: tuple[str, ...], reserved: tuple[str, ...]) -> str:
    """A wording that the scope allows."""
    if scope.both:
        return dice.pick(common + reserved)
    return dice.pick(reserved if scope.reserved else common)
