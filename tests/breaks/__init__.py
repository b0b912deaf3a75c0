"""Deliberate breaks of the package, each a plausible mistake, and the tests that see it; `mutations.py` tries them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Break:
    """One mistake: in a file a text, which occurs once, is replaced by another one."""

    name: str
    file: str
    old: str
    new: str
    seen_by: str
    """The tests that should fail, by files or node ids with a space between them."""

    @property
    def tests(self) -> list[str]:
        """The tests as a list."""
        return self.seen_by.split()
