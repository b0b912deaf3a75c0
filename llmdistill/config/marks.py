"""What is known of a setting beside its type, default and help stands at its field, as metadata."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_type_hints

FREE = {"free": True}
"""The setting cannot change the student, or only by rounding: a run that goes on may have another value."""
COMMON = {"common": True}
"""The setting is one that most runs give: the short help shows it."""

VALUES = "values"
"""The setting is a mapping with free keys, and each of its values a section of this class."""


def replaces(*keys: str, by: Collection[Any] | None = None, unless: Collection[Any] = (None,)) -> dict[Any, Any]:
    """Mark a setting that sets others back to their defaults, if a recipe below it has them; such marks can be joined.

    Args:
        keys: the other settings, by dotted key.
        by: the values that replace them; None for all but `unless`.
        unless: the values that do not.
    """
    return {keys: lambda value: value not in unless if by is None else value in by}


def settings_of(config: type[Any], prefix: str = "") -> dict[str, Field[Any]]:
    """Return every field by its dotted key, in their order, each section before what is in it."""
    found, kinds = dict[str, Field[Any]](), get_type_hints(config)
    for each in fields(config):
        key, kind = f"{prefix}{each.name}", kinds[each.name]
        found[key] = each
        if isinstance(kind, type) and is_dataclass(kind):
            found |= settings_of(kind, f"{key}.")
    return found


def marked(config: type[Any], mark: str) -> list[str]:
    """Return the dotted keys of the settings with a mark, in their order; a section that has the mark is one key."""
    found: list[str] = []
    for key, field in settings_of(config).items():
        if mark in field.metadata and not any(key.startswith(f"{section}.") for section in found):
            found.append(key)
    return found
