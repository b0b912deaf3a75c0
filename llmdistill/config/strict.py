"""Strict parsing: an unknown key is an error that names the nearest known key, and each error is one sentence."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from llmdistill.config.foreign import our_name
from llmdistill.errors import UserError
from llmdistill.internals.parser_names import actions, type_of


def check_keys(parser: ArgumentParser, keys: Iterable[str], *, where: str = "", prefix: str = "") -> None:
    """Raise a UserError for the first key that is no setting of the parser; it names the nearest known key.

    A key below a mapping with free keys, such as data.tests, is a setting too.
    """
    known = {
        option.removeprefix("--"): "dict[" in str(type_of(action))
        for action in actions(parser)
        for option in action.option_strings
        if option.startswith("--")
    }
    for key in keys:
        parents = [key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)]
        if key not in known and not any(known.get(parent, False) for parent in parents):
            hint = our_name(key, known, prefix) or did_you_mean(key, known, prefix) or "; --help lists them all"
            raise UserError(f"{where}{prefix}{key}: there is no such setting{hint}")


def check_sections(parser: ArgumentParser, values: dict[str, Any], *, where: str) -> None:
    """Raise a UserError if the value of a section, by its dotted key, is not a mapping of settings."""
    sections = {
        option.removeprefix("--").rsplit(".", depth)[0]
        for action in actions(parser)
        for option in action.option_strings
        for depth in range(1, option.count(".") + 1)
    }
    for key, value in values.items():
        if key in sections and not isinstance(value, dict):
            text = "null" if value is None else _short(repr(value))
            raise UserError(
                f"{where}{key} is {text}: a section holds settings, such as {key}: {{...}}; fix it or leave it out"
            )


class UniqueKeys(yaml.SafeLoader):
    """YAML's safe loader, which refuses a key that a mapping has twice: it would take the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise a ConstructorError for a second key, with its mark."""
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                raise TwiceError(None, None, f"{key.value} is given twice", key.start_mark)
            # YAML's merge key << may stand in a mapping several times.
            seen.add(name if name is not None and key.tag != "tag:yaml.org,2002:merge" else object())
        return super().construct_mapping(node, deep)


class TwiceError(yaml.constructor.ConstructorError):
    """A key that a mapping has twice."""


def check_unique(text: str, where: str) -> None:
    """Raise a UserError, which names the line, if an object in a JSON text has a key twice."""
    twice: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.extend(name for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    if twice:
        try:
            # JSON may be indented by tabs, which YAML refuses.
            yaml.load(text.replace("\t", " "), UniqueKeys)  # which knows the lines, and reads JSON too
            line = ""
        except TwiceError as error:
            line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        except yaml.YAMLError:
            line = ""
        raise UserError(f"{where}{line}: {twice[0]} is given twice: leave one of them out")


_MOST_BITS = 63  # larger numbers do not fit into the integers of numpy and torch


def check_plain(value: Any, key: str) -> None:
    """Raise a UserError for a value of a setting that no setting takes: nan, inf, a huge number, or broken text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} is {value}: give a finite number")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise UserError(f"{key} has {value.bit_length()} bits: give a number of at most {_MOST_BITS} bits")
    if isinstance(value, str) and not _is_text(value):
        raise UserError(f"{key} is {_short(ascii(value))}: it holds what is no character; give plain text")
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_plain(name, f"a key of {key}")
            check_plain(item, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_plain(item, key)


def _is_text(value: str) -> bool:
    """Return whether a text can be a path or a word of a command line, and be written to a file in UTF-8."""
    try:
        return b"\0" not in value.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def did_you_mean(value: str, choices: Iterable[str], prefix: str = "") -> str:
    """Return a hint at the choice nearest to a value, by its whole name or its last part; "" if none is near."""
    names = list(choices)
    matches = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    last = value.rsplit(".", 1)[-1]
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}  # if equal, the first wins: the run's own
    same_last = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
    if same_last and (not matches or matches[0].rsplit(".", 1)[-1] != same_last[0]):
        matches = [by_last[same_last[0]]]
    return f"; did you mean {prefix}{matches[0]}?" if matches else ""


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: value}
    return flat


def one_sentence(message: str) -> str:
    """Shorten a message of jsonargparse, which has several lines, to the key, the value and the allowed values."""
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    value = re.search(r"(?:Given value|Got value): (.*)", message)
    expected = re.findall(r"Expected an? ([^\n]*?)(?:\. Got|\n|$)", message)
    if key is not None and value is not None:
        kinds = " or ".join(dict.fromkeys(re.sub(r"<class '(\w+)'>|typing\.", r"\1", kind) for kind in expected))
        text = "null" if value.group(1) == "None" else repr(_short(value.group(1)))  # as YAML and --help write it
        literals = re.findall(r"Literal\[(.*?)\]", kinds)
        choices = [choice.strip("' \"") for literal in literals for choice in literal.split(",")]
        kinds = re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace("'", ""), kinds).replace("NoneType", "null")
        plain = value.group(1) if re.fullmatch(r"[^\s\[{]{1,60}", value.group(1)) else "VALUE"
        kinds = re.sub(r"\bdict\b", f"a mapping such as '{{NAME: {plain}}}'", kinds)
        kinds = re.sub(r"\btuple\b", "numbers such as [0.9, 0.999]", kinds)
        hint = did_you_mean(value.group(1).strip("'"), choices)
        return f"{key.group(1)}: {text} does not fit; expected {kinds or 'what --help says'}{hint}"
    section = re.search(r'key "([\w.]+)":\s+Unable to load config ([^\n]*)', message)
    if section is not None:
        return f"{section.group(1)}: {_short(section.group(2))} does not fit; expected settings such as {{...}}"
    unknown = re.search(r'[Kk]ey "([\w.]+)":.*Option .(\w+). is not accepted', message, re.DOTALL)
    if unknown is not None:
        return f"{unknown.group(1)}: {unknown.group(2)} is no setting of its entries; --help lists those that are"
    digits = re.search(r'key "([\w.]+)":\s+Exceeds the limit', message)
    if digits is not None:
        return f"{digits.group(1)}: a number with too many digits; give a smaller one"
    required = re.search(r'"([\w.]+)" is required', message)
    if required is not None:
        return f"--{required.group(1)} is missing: give it on the command line or in the recipe"
    missing = re.search(r"arguments are required: ([^\n]*)", message)
    if missing is not None:
        names = re.sub(r"[\w.]+", r"--\g<0>", missing.group(1))
        return f"missing on the command line: {names}"
    rest = re.search(r"unrecognized arguments: ([^\n]*)", message)
    if rest is not None:
        return (
            f"{_short(rest.group(1))!r} has no place here: a value with spaces needs quotation marks, and a setting "
            "two dashes before its name"
        )
    return " ".join(message.split())
