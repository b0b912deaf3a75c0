"""What is known of a setting beside its type, default and help stands at its field, as metadata."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

FREE = {"free": True}
"""The setting cannot change the student, or only by rounding: a run that goes on may have another value."""
COMMON = {"common": True}
"""The setting is one that most runs give: the short help shows it."""


def marked(config: type[Any], mark: str) -> list[str]:
    """Return the dotted keys of the settings with a mark, in their order; a section that has the mark is one key."""
    found, kinds = list[str](), get_type_hints(config)
    for each in fields(config):
        kind = kinds[each.name]
        if mark in each.metadata:
            found.append(each.name)
        elif isinstance(kind, type) and is_dataclass(kind):
            found += [f"{each.name}.{key}" for key in marked(kind, mark)]
    return found
