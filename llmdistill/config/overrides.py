"""Settings that a later layer resets in the recipes below it: rivals of its own settings, or contradictions.

The settings of a run come in layers: a recipe, the recipes that extend it, the command line. Where two settings exclude
each other, the later layer decides alone, so that `--student.factorize.rank 30` also works on a recipe with
target_params. Each setting says at its field what it replaces (`marks.replaces`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any

import yaml

from llmdistill.config.marks import REPLACED_BY
from llmdistill.config.strict import TwiceError, UniqueKeys
from llmdistill.errors import UserError

_WEIGHTING = "student.factorize.weighting"
_CALIBRATION_DATA = "student.factorize.calibration.data"


def find_replaced(
    layer: Mapping[str, Any], below: Mapping[str, Any], settings: Mapping[str, Field[Any]]
) -> dict[str, Any]:
    """Return the settings that a layer resets in the layers below it, by dotted key, with their defaults.

    Args:
        layer: the settings of the layer, by dotted key; none of them is reset.
        below: the settings of the layers below it. A setting of the layer that only repeats its value there resets
            nothing, and only settings that these layers have are reset.
        settings: the field of every setting, whose marks say what it replaces (see `marks.replaces`).
    """
    back: dict[str, Any] = {}
    for key, value in layer.items():
        if key in below and value == below[key]:
            continue
        parts = key.split(".")
        # The key may go into a mapping with free keys, such as ranks by pattern, whose field has the marks.
        above = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
        setting = next((settings[parent] for parent in above if parent in settings), None)
        for others, gives_way in () if setting is None else setting.metadata.items():
            if isinstance(others, tuple) and gives_way(value):
                back |= {other: _default_value(settings[other]) for other in others}
        back |= {
            other: _default_value(field)
            for other, field in settings.items()
            if value in field.metadata.get(REPLACED_BY, {}).get(key, ())
        }
    # Without a weighting, calibration data have no use unless `important` chooses parts of a student by them. A student
    # that is not made by svd takes a weighting back.
    chosen = {**below, **layer}
    measures = "important" in (chosen.get("student.init"), chosen.get("student.layers"))
    is_plain = chosen.get(_WEIGHTING) == "none" or (_WEIGHTING in back and _WEIGHTING not in layer)
    if is_plain and not measures:
        back[_CALIBRATION_DATA] = None
    return {
        key: value
        for key, value in back.items()
        if any(f"{lower}.".startswith(f"{key}.") for lower in below)
        and not any(f"{own}.".startswith(f"{key}.") for own in layer)
    }


def _default_value(setting: Field[Any]) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def flags(back: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in back.items()]


def given_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the words of a command line, by dotted key, with values as YAML reads them."""
    values: dict[str, Any] = {}
    for number, word in enumerate(words):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                value = words[number + 1] if number + 1 < len(words) else "true"
            try:
                values[key] = yaml.load(value, UniqueKeys)
            except TwiceError as error:
                raise UserError(f"--{key}: {error.problem}: leave one of them out") from error
            except Exception:  # the readers of YAML's types raise exceptions of many types
                values[key] = value
    return values
