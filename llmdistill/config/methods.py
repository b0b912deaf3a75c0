"""What the configuration needs from the table of training methods, which callers pass: llmdistill.methods.METHODS."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from llmdistill.config.strict import did_you_mean
from llmdistill.errors import UserError

MethodTable = Mapping[str, Any]
"""Name of a method -> its `methods.entry.MethodEntry`, a class that the configuration cannot import."""


def with_teacher(known: MethodTable) -> list[str]:
    """Return the methods that need a teacher during training."""
    return [name for name, method in known.items() if method.needs_teacher]


def check_names(key: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Raise a UserError if a setting names a method that is not allowed."""
    for name in names:
        if name not in allowed:
            hint = did_you_mean(name, allowed)
            raise UserError(f"{key}: {name!r} does not fit; expected {', '.join(allowed)}{hint}")
