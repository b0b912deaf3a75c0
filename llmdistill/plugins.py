"""What other packages add by entry points: methods, divergences, tasks, teachers and forms of the student."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from llmdistill.messages import logger


def plugins(group: str, own: Container[str], *, key: Callable[[str], str] = str) -> Iterator[EntryPoint]:
    """Yield the entry points that installed packages have in a group, such as `llmdistill.methods`.

    One with a name of this package's `own` is left out with a warning: a recipe means the same on every machine. `key`
    gives the form in which names are compared.
    """
    for entry in entry_points(group=group):
        if key(entry.name) in own:
            logger.warning("%s is a name of llmdistill's own, so %s of %s is left out", entry.name, entry.value, group)
        else:
            yield entry


def load_plugins(group: str, own: Container[str]) -> dict[str, Any]:
    """Return what the entry points of a group stand for; one that cannot be imported is left out with a warning."""
    additions: dict[str, Any] = {}
    for entry in plugins(group, own):
        try:
            additions[entry.name] = entry.load()
        except Exception as error:  # a package of somebody else must not keep every command from starting
            logger.warning("%s of %s is left out: %s: %s", entry.value, group, type(error).__name__, error)
    return additions
