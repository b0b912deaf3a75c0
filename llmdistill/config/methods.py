"""What the configuration needs from the table of training methods, which callers pass: llmdistill.methods.METHODS."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class MethodInfo(Protocol):
    """What the configuration needs to know of one method; `MethodEntry` explains each field."""

    @property
    def help(self) -> str:
        """A description of the method in a few words."""

    @property
    def settings(self) -> type[Any] | None:
        """The dataclass of its settings, if any."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the method needs a teacher during training."""

    @property
    def on_policy(self) -> bool:
        """Whether the student can learn from answers that it generates itself."""

    @property
    def searches_layer(self) -> bool:
        """Whether the method can search for the teacher's layer."""

    @property
    def check(self) -> Any:
        """Checks the method's settings against those of a run."""


MethodTable = Mapping[str, MethodInfo]


def with_teacher(known: MethodTable) -> list[str]:
    """The methods that need a teacher during training."""
    return [name for name, method in known.items() if method.needs_teacher]


def check_names(key: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Check that all methods in a setting exist.

    Raises:
        ValueError: a method does not exist.
    """
    for name in names:
        if name not in allowed:
            raise ValueError(f"{key}: {name!r} does not fit; expected {', '.join(allowed)}")
