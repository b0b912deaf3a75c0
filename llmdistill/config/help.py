"""The help of the main job: the common settings first, and every setting by section or all at once."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

from jsonargparse import ArgumentParser

from llmdistill.config import RunConfig
from llmdistill.config.marks import find_marked
from llmdistill.config.strict import did_you_mean
from llmdistill.errors import UserError
from llmdistill.internals.parser_names import actions

ALL = "all"
COMBINATIONS = "combinations"
"""The topic that `training.rules` answers, which knows the models that a run loads."""
RUN = "run"
"""The section of the settings that are in none."""
_WIDTH = 36


def hide_stubs(parser: ArgumentParser) -> None:
    """Leave out of the help the flags that take a section from a file or show its help, which jsonargparse adds."""
    for action in actions(parser):
        if action.metavar == "CONFIG" or action.dest.endswith(".help"):
            action.help = argparse.SUPPRESS


def find_help_topic(words: Sequence[str]) -> str | None:
    """Return the topic of --help: a section, `all`, or "" for the common settings; None if no help is requested."""
    place = next((n for n, word in enumerate(words) if word == "-h" or word.split("=")[0] == "--help"), None)
    if place is None:
        return None
    _, equals, topic = words[place].partition("=")
    following = "".join(words[place + 1 : place + 2])
    return topic if equals else "" if following.startswith("-") else following


def help_of(parser: ArgumentParser, topic: str, methods: Collection[str]) -> str:
    """Return the help of the common settings (""), of all settings (`all`), or of a section such as train or makd."""
    if topic == "":
        by_key = {_key_of(action): action for action in actions(parser)}
        width = max(80, min(118, shutil.get_terminal_size().columns - 2))
        lines = [f"usage: {parser.usage}", "", textwrap.fill(str(parser.description), width), "", "common settings:"]
        # The flags that are no settings of a run stand around them.
        for key in ("recipe", *find_marked(RunConfig, "common"), "dry_run", "check"):
            flag, text = f"  --{key}", " ".join(str(by_key[key].help).split())
            text = re.split(r"(?<=\.) |; ", text, maxsplit=1)[0].rstrip(".") + "."  # the first sentence or clause
            default = by_key[key].default
            if default not in (None, False, argparse.SUPPRESS) and default != {}:
                text += f" (default: {default})"
            lines += _aligned(flag, text, width)
        plain = [section for section in _list_sections(parser) if section not in methods]
        with_settings = [section for section in _list_sections(parser) if section in methods]
        lines += ["", "more settings:"]
        for flag, text in (
            ("SECTION", f"{', '.join(plain)}, or a part such as student.lora"),
            ("METHOD", ", ".join(with_settings)),
            (COMBINATIONS, "what does not go together"),
            (ALL, "every setting"),
        ):
            lines += _aligned(f"  --help {flag}", text, width)
        return "\n".join(lines) + "\n"
    if topic == ALL:
        return parser.format_help()
    others = [
        action
        for action in _list_settings(parser)
        # The settings of a run itself are those whose keys have no dot.
        if ("." in _key_of(action) if topic == RUN else not f"{_key_of(action)}.".startswith(f"{topic}."))
    ]
    if len(others) == len(_list_settings(parser)):
        hint = did_you_mean(topic, [ALL, COMBINATIONS, *_list_sections(parser)]) or "; --help lists them"
        raise UserError(f"--help {topic}: there is no such section{hint}; give `--help all` for every setting")
    # argparse hides an action with a suppressed help; the parser is used again later, so the texts are put back.
    texts = [action.help for action in others]
    for action in others:
        action.help = argparse.SUPPRESS
    try:
        return parser.format_help()
    finally:
        for action, text in zip(others, texts, strict=True):
            action.help = text


def _aligned(flag: str, text: str, width: int) -> list[str]:
    """Return the lines of a flag with its text in a column beside it."""
    first, *others = textwrap.wrap(text, width - _WIDTH)
    return [f"{flag:{_WIDTH}}{first}", *(" " * _WIDTH + line for line in others)]


def _list_settings(parser: ArgumentParser) -> list[Any]:
    return [action for action in actions(parser) if action.help != argparse.SUPPRESS and action.option_strings]


def _key_of(action: Any) -> str:
    """Return the dotted key of a flag."""
    # argparse's own flag is -h, --help; every other one begins with its key.
    return str(action.option_strings[-1 if action.option_strings[0] == "-h" else 0]).removeprefix("--")


def _list_sections(parser: ArgumentParser) -> list[str]:
    keys = [_key_of(action) for action in _list_settings(parser)]
    return [RUN, *dict.fromkeys(key.split(".")[0] for key in keys if "." in key)]
