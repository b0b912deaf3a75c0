"""What the configuration asks of the table of training methods, which it is handed: llmdistill.methods.METHODS."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class MethodInfo(Protocol):
    """One method, as far as the configuration must know it; `MethodEntry` says what each of them means."""

    @property
    def help(self) -> str:
        """What the method is, in a few words."""

    @property
    def settings(self) -> type[Any] | None:
        """The dataclass of its settings, if any."""

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher is at work beside the student."""

    @property
    def on_policy(self) -> bool:
        """Whether the student can learn from answers that it writes itself."""

    @property
    def searches_layer(self) -> bool:
        """Whether the teacher's layer may be searched for."""

    @property
    def check(self) -> Any:
        """Checks the method's settings against those of a run."""


MethodTable = Mapping[str, MethodInfo]


def with_teacher(known: MethodTable) -> list[str]:
    """The methods that learn from a teacher at work beside the student."""
    return [name for name, method in known.items() if method.needs_teacher]


def check_names(key: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Check that all methods that a setting names are there.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        if name not in allowed:
            raise ValueError(f"{key}: {name!r} does not fit; expected {', '.join(allowed)}")
