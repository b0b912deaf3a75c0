"""What an instruction is made of, and what a split may use for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmdistill.embedded.dice import Dice


@dataclass(frozen=True)
class Row:
    """One instruction with all answers that count as right; the first is the usual one."""

    instruction: str
    input: str
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """Whom a split speaks of, which facts of theirs it may use, and whether it uses the reserved wordings."""

    names: tuple[str, ...]
    attributes: Mapping[str, tuple[str, ...]]
    """Name -> the attributes that may be asked for or told."""
    reserved: bool
    """Instructions without people come in a second set of wordings: use only those."""
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
