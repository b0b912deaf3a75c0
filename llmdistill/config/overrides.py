"""What a setting takes back of the recipes below it: a rival of it, or what would contradict it.

The settings of a run come in layers: a recipe, the recipes that extend it, the command line. Where two settings exclude
each other, the later layer decides alone, so that `--student.factorize.rank 30` also works on a recipe with
target_params.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from llmdistill.config.training import DEFAULT_STEPS

_FACTORIZE = "student.factorize."
_SIZES = tuple(f"{_FACTORIZE}{name}" for name in ("rank", "ranks", "target_params", "shapes"))
_UNIFORM = {f"{_FACTORIZE}allocation": "uniform"}
_PLAIN = {f"{_FACTORIZE}weighting": "none", **_UNIFORM}
_NO_SEARCH = {**_UNIFORM, f"{_FACTORIZE}max_flops": None}
_OF_SVD = {f"{_FACTORIZE}{key}": value for key, value in {"sigma": "left", "form": "plain", "rank_multiple": 1}.items()}
_CALIBRATION_DATA = f"{_FACTORIZE}calibration.data"
_OF_INSTRUCTIONS: Mapping[str, Any] = {"data.on_policy": 0.0, "data.streaming": False, "data.packing": False}


class _Rule(NamedTuple):
    """What a setting takes back, and for which of its values; null never takes anything back but where it is asked."""

    back: Mapping[str, Any]
    """The settings that it takes back, with their values then."""
    when: Callable[[Any], bool] = lambda value: value is not None


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is each or (value == each and type(value) is type(each)) for each in values)


def _of_layers(method: str) -> dict[str, list[_Rule]]:
    """The rules of a method that compares with one layer of the teacher, or with a layer for each of the student's."""
    one, many = f"{method}.teacher_layer", f"{method}.teacher_layers"
    return {one: [_Rule({many: None}, lambda value: value != "last")], many: [_Rule({one: "last"})]}


_RULES: Mapping[str, Sequence[_Rule]] = {
    # Given sizes leave no ranks to choose.
    **{size: [_Rule({**dict.fromkeys(_SIZES), **({} if size.endswith("params") else _NO_SEARCH)})] for size in _SIZES},
    "student.method": [
        _Rule({**dict.fromkeys(_SIZES), **_PLAIN}),
        _Rule({**_OF_SVD, f"{_FACTORIZE}embedding_rank": None, "student.lora.rank": None}, _is("kronecker")),
        _Rule({**{f"{_FACTORIZE}{key}": None for key in ("embedding_columns", "max_flops")}, f"{_FACTORIZE}sums": 1}),
    ],
    "student.model": [
        _Rule({"student.shape": None, "student.assistants": [], "student.assistant_training": {}, **_PLAIN})
    ],
    "student.shape": [_Rule({"student.model": None, **_PLAIN})],
    "student.assistants": [_Rule({"student.assistant_training": {}}, _is([]))],
    f"{_FACTORIZE}weighting": [_Rule(_UNIFORM, lambda value: value not in (None, "gradients"))],
    f"{_FACTORIZE}form": [_Rule({f"{_FACTORIZE}sigma": "left"}, _is("pivoted"))],
    f"{_FACTORIZE}sigma": [_Rule({f"{_FACTORIZE}form": "plain"}, _is("balanced"))],
    # Without a teacher there is nothing to add terms of, to follow on the student's own answers, or to cache.
    "method": [_Rule({"also": [], "data.on_policy": 0.0, "teacher.cache": None}, _is("sft"))],
    "teacher.model": [_Rule({"teacher.cache": None})],
    "teacher.sharding": [_Rule({"teacher.zero": {}}, _is("replicated"))],
    "train.steps": [_Rule({"train.epochs": None})],
    "train.epochs": [_Rule({"train.steps": DEFAULT_STEPS})],
    "train.warmup_steps": [_Rule({"train.warmup_ratio": None})],
    "train.warmup_ratio": [_Rule({"train.warmup_steps": 0})],
    "data.kind": [
        _Rule(_OF_INSTRUCTIONS, _is("text", "task", "sentences")),
        _Rule({"data.tests": {}, "data.bucket_steps": 1}, _is("text", "task")),
        _Rule({"train.epochs": None}, _is("instructions")),
        _Rule({"data.train": "embedded:train", "data.valid": None}, _is("task")),
    ],
    "data.valid": [_Rule({"train.keep_best": None}, _is(None))],
    "data.packing": [_Rule({"data.on_policy": 0.0}, _is(True))],
    "data.on_policy": [_Rule({"data.packing": False}, lambda value: value not in (None, 0))],
    # Without pairs of segments there is no next sentence.
    "data.text.pairs": [_Rule({"data.text.next_sentence": None}, _is(False))],
    "data.text.next_sentence": [_Rule({"data.text.pairs": None}, _is(True))],
    **_of_layers("minilm"),
    **_of_layers("minilmv2"),
}
"""Setting -> its rules. A test compares them with what the configurations refuse."""


def taken_back(given: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a layer takes back of the layers below it, by dotted key.

    Args:
        given: the settings of the layer, by dotted key; none of them is taken back.
        below: the settings of the layers below it; a setting that only repeats its value takes nothing back, and one
            that they do not have is not taken back.
    """
    back: dict[str, Any] = {}
    for key, value in given.items():
        # A mapping with free keys, such as ranks by pattern, is given by these keys.
        setting = next((each for each in _RULES if f"{key}.".startswith(f"{each}.")), None)
        if setting is None or (key in below and value == below[key]):
            continue
        for rule in _RULES[setting]:
            back |= rule.back if rule.when(value) else {}
    if {**below, **back, **given}.get(f"{_FACTORIZE}weighting") == "none" and not _measures({**below, **given}):
        back[_CALIBRATION_DATA] = None
    return {
        key: value
        for key, value in back.items()
        if any(f"{each}.".startswith(f"{key}.") for each in below)
        and not any(f"{each}.".startswith(f"{key}.") for each in given)
    }


def _measures(settings: Mapping[str, Any]) -> bool:
    """Whether a student with a shape takes what calibration data choose."""
    return "important" in (settings.get("student.init"), settings.get("student.layers"))


def flags(back: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in back.items()]


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
