"""Marks of settings: properties beside type, default and help, which stand as metadata at the field."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass
from typing import Any, get_type_hints

from llmdistill.errors import UserError

FREE = {"free": True}
"""The setting cannot change the student, or only by rounding: a run that goes on may have another value."""
COMMON = {"common": True}
"""The setting is one that most runs give: the short help shows it."""

VALUES = "values"
"""The setting is a mapping with free keys, and each of its values a section of this class."""


def takes(fits: Callable[[Any], object], wanted: str) -> dict[Any, Any]:
    """Mark the values that a setting takes beside None: those of which `fits` is true; `wanted` says so to the user."""
    return {"takes": (fits, wanted)}


def at_least(number: int, hint: str = "") -> dict[Any, Any]:
    """Mark the least value of a setting."""
    return takes(lambda value: value >= number, f"give {number} or more{hint}")


def distinct(least: float = -math.inf, wanted: str = "") -> dict[Any, Any]:
    """Mark a list that has a value, each once, and none below the least."""
    return takes(
        lambda values: values and len(set(values)) == len(values) and (least == -math.inf or min(values) >= least),
        f"give one or more, each once{wanted}",
    )


OVER_0 = takes(lambda value: value > 0, "give a number over 0")
SHARE = takes(lambda value: 0 <= value <= 1, "give a share from 0 to 1")
SHARE_OVER_0 = takes(lambda value: 0 < value <= 1, "give a share over 0 and up to 1")
SHARE_BELOW_1 = takes(lambda value: 0 <= value < 1, "give a share from 0 to below 1")

ADDRESS = takes(
    lambda value: value.startswith(("http://", "https://")), "give an address such as http://localhost:8000"
)
PATIENCE = takes(lambda value: 0 < value <= 1e6, "give a number over 0, and of 1,000,000 seconds at most")
"""Sockets refuse much longer timeouts."""


def check_taken(setting: Field[Any], value: Any, key: str) -> None:
    """Raise a UserError if a setting, which the user calls `key`, does not take a value."""
    fits, wanted = setting.metadata.get("takes", (None, ""))
    if fits is not None and value is not None and not fits(value):
        raise UserError(f"{key} is {value}: {wanted}")


def replaces(*keys: str, by: Collection[Any] | None = None, unless: Collection[Any] = (None,)) -> dict[Any, Any]:
    """Mark a setting that sets others back to their defaults, if a recipe below it has them; such marks can be joined.

    Args:
        keys: the other settings, by dotted key.
        by: the values that replace them; None for all but `unless`.
        unless: the values that do not.
    """
    return {keys: lambda value: value not in unless if by is None else value in by}


REPLACED_BY = "replaced by"


def replaced_by(key: str, *values: Any) -> dict[Any, Any]:
    """Mark a setting that these values of another setting set back to its default, as `replaces` does from there."""
    return {REPLACED_BY: {key: values}}


def earlier_default(value: Any) -> dict[Any, Any]:
    """Mark a setting whose default was another one in earlier versions: what their records mean that do not have it."""
    return {"earlier default": value}


def earlier_defaults(config: type[Any]) -> dict[str, Any]:
    """Return the values that records of earlier versions mean by leaving a setting out, by dotted key."""
    mark = "earlier default"
    return {key: field.metadata[mark] for key, field in settings_of(config).items() if mark in field.metadata}


def settings_of(config: type[Any], prefix: str = "") -> dict[str, Field[Any]]:
    """Return every field by its dotted key, in their order, each section before its own fields."""
    by_key, kinds = dict[str, Field[Any]](), get_type_hints(config)
    for field in fields(config):
        key, kind = f"{prefix}{field.name}", kinds[field.name]
        by_key[key] = field
        if isinstance(kind, type) and is_dataclass(kind):
            by_key |= settings_of(kind, f"{key}.")
    return by_key


def find_marked(config: type[Any], mark: str) -> list[str]:
    """Return the dotted keys of the settings with a mark, in their order; a section that has the mark is one key."""
    keys: list[str] = []
    for key, field in settings_of(config).items():
        if mark in field.metadata and not any(key.startswith(f"{section}.") for section in keys):
            keys.append(key)
    return keys
