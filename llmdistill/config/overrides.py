"""What a setting takes back of the recipes below it: a rival of it, or what would contradict it.

The settings of a run come in layers: a recipe, the recipes that extend it, the command line. A layer that says how the
student is made decides this alone, so that `--student.factorize.rank 30` also works on a recipe with target_params.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

_SIZES = tuple(f"student.factorize.{name}" for name in ("rank", "ranks", "target_params", "shapes"))
_UNIFORM = {"student.factorize.allocation": "uniform"}
_PLAIN = {"student.factorize.weighting": "none", **_UNIFORM}

_TAKES_BACK: Mapping[str, Mapping[str, Any]] = {
    # Given sizes leave no ranks to choose.
    **{size: {**dict.fromkeys(_SIZES), **({} if size.endswith("target_params") else _UNIFORM)} for size in _SIZES},
    "student.method": {**dict.fromkeys(_SIZES), **_PLAIN},
    "student.model": {"student.shape": None, **_PLAIN},
    "student.shape": {"student.model": None, **_PLAIN},
    "student.factorize.weighting": _UNIFORM,
    # Without pairs of segments there is no next sentence.
    "data.text.pairs": {"data.text.next_sentence": None},
}
"""Setting -> the settings that it takes back, with their values then."""
_TAKES_NOTHING_BACK = (None, "gradients")
"""Values that contradict no other setting, as true does."""


def taken_back(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a layer takes back of the layers below it, by dotted key.

    Args:
        given: the settings of the layer, by dotted key; none of them is taken back.
        below: the settings of the layers below it; a setting that only repeats its value takes nothing back.
    """
    back: dict[str, Any] = {}
    for key, value in given.items():
        # A mapping with free keys, such as ranks by pattern, is given by these keys.
        setting = next((each for each in _TAKES_BACK if f"{key}.".startswith(f"{each}.")), None)
        contradicts = value is not True and value not in (*_TAKES_NOTHING_BACK, below.get(key))
        if setting is not None and contradicts:
            back |= _TAKES_BACK[setting]
    return {key: value for key, value in back.items() if not any(f"{each}.".startswith(f"{key}.") for each in given)}


def flags(back: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line."""
    return [f"--{key}={'null' if value is None else value}" for key, value in back.items()]


def given_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the words of a command line, by dotted key, with values as YAML reads them."""
    given: dict[str, Any] = {}
    for number, word in enumerate(words):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            following = words[number + 1] if number + 1 < len(words) else "true"
            given[key] = _read(value if equals else following)
    return given


def _read(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except Exception:  # the readers of YAML's types raise exceptions of many types
        return value
