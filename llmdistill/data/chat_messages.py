"""Parses the messages of a chat: OpenAI's role and content, ShareGPT's from and value, and what stands beside them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from llmdistill.data.readers import by_lower_case, with_names, without_nulls
from llmdistill.errors import UserError
from llmdistill.files import has_half_surrogate, parse_json


@dataclass(frozen=True)
class Turn:
    """One message of a chat."""

    role: str
    """system, user, assistant or tool."""
    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other keys of the message that a chat template may read, such as reasoning_content, thinking, tool_calls,
    tool_call_id and name."""
    is_learned: bool = True
    """Whether an assistant turn may be learned: false for OpenAI's ``weight: 0`` and a turn's ``train: false``."""

    def as_message(self) -> dict[str, Any]:
        """Return the message in the form of `apply_chat_template`."""
        return {"role": self.role, "content": self.content, **self.fields}


Messages = tuple[Turn, ...]

_CALL = "call"
"""A message that is nothing but calls of tools, as JSON in its content: a turn of the assistant."""
_ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai"),
    "tool": ("tool", "observation", "function", "tool_response", "function_response", "ipython"),
    _CALL: ("function_call", "tool_call"),
}
_NAMES = frozenset(("role", "from"))
"""Keys of which a message has one."""
_KEYS = by_lower_case((*_NAMES, "content", "value"))
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}

LEARNED = ("weight", "train", "training", "trainable", "loss", "loss_weight")
"""Keys that say whether a message, or a whole row, is learned: OpenAI, axolotl, xtuner, ms-swift, LLaMA-Factory."""
_MASKED = "masked"
"""The key of torchtune, which says the opposite."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio", "objects")
"""Keys of what a text model cannot read."""
IN_WORDS = {"true": 1, "false": 0, "1": 1, "0": 0, "1.0": 1, "0.0": 0}
"""What the cells of CSV say; pandas writes a column with an empty cell as 1.0 and 0.0."""
_PARTLY = ("train_detail", "training_detail")
_REFUSED = {
    **{key: "is no text, and only texts are read" for key in MEDIA},
    **{key: "has parts of a message learned, and a message is learned as a whole or not" for key in _PARTLY},
    "refusal": "stands beside the content; write what the assistant said as its content",
}


_PARTS = {
    "text": ("text", "input_text", "output_text"),
    "reasoning": ("reasoning", "thinking"),
    "call": ("tool_call",),
}
"""The types of a message's parts."""

_OPENS = re.compile(r"\s*[\[{]")
# A quoted text, which stays as it is; a gap between two objects, which gets a comma; or what stands around an array,
# which is left out.
_TEXT_GAP_OR_ARRAY = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<gap>\}\s+\{)|array\(|(?:,\s*dtype=[\w<>]+)?\)"""
)


def as_turns(value: object) -> object:
    """Return the messages of a chat as a list, however a table stores them; anything else as it is.

    A cell of CSV stores them as a text, and older versions of the datasets library as a list for each key.
    """
    read = value
    if isinstance(value, str) and _OPENS.match(value):
        try:
            read = _read_text(value)
        except json.JSONDecodeError:
            return value
    if isinstance(read, Mapping) and all(map(is_list, read.values())) and len(set(map(len, read.values()))) == 1:
        read = [dict(zip(read, message, strict=True)) for message in zip(*read.values(), strict=True)]
    return read if are_turns(read) else value


def are_turns(value: object) -> bool:
    return (
        is_list(value)
        and len(value) > 0
        and all(isinstance(message, Mapping) and _NAMES & with_names(message, _KEYS, "").keys() for message in value)
    )


def as_texts(value: object) -> list[str] | None:
    """Return a list of texts, also one that a cell of CSV stores as a text; None for anything else."""
    if isinstance(value, str) and _OPENS.match(value):
        with suppress(json.JSONDecodeError):
            value = _read_text(value)
    return list(value) if is_list(value) and len(value) and all(isinstance(text, str) for text in value) else None


def parse_messages(value: object, key: str, source: str) -> Messages:
    """Parse a list of messages; several calls of tools that follow one another are one turn.

    Raises:
        UserError: it is no such list, or a message has an unknown role, no text, or a part that is not read.
    """
    if not is_list(value) or not len(value):
        raise UserError(f'{source}: "{key}" is {excerpt(value)}; give a list of messages with role and content')
    # In a table, such as pandas and datasets write to JSONL, all messages have the same keys, and arguments of calls
    # the names of all calls, with null for what one lacks. Elsewhere a null inside of a value may be meant.
    has_equal_keys = all(isinstance(message, Mapping) and message.keys() == value[0].keys() for message in value)
    if has_equal_keys and len(value) > 1 and any(cell is None for message in value for cell in message.values()):
        value = [without_nulls(message) for message in value]
    turns: list[Turn] = []
    last = ""
    for place, message in enumerate(value, start=1):
        name, turn = _parse_message(message, f'{source}: message {place} of "{key}"')
        if name == last == _CALL:
            before = turns.pop()
            calls = [*before.fields["tool_calls"], *turn.fields["tool_calls"]]
            turn = replace(turn, fields={"tool_calls": calls}, is_learned=turn.is_learned and before.is_learned)
        turns.append(turn)
        last = name
    return tuple(turns)


def _parse_message(message: object, where: str) -> tuple[str, Turn]:
    """Return the kind of a message, and its turn."""
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is {excerpt(message)}; give an object with role and content")
    # Tables give all messages of a column the same keys, with null where one has nothing.
    fields = dict(with_names({key: value for key, value in message.items() if value is not None}, _KEYS, where))
    # Both names are popped, so that neither is left among the fields that the template reads.
    role, content = (
        fields.pop(key, fields.pop(other, None)) for key, other in (("role", "from"), ("content", "value"))
    )
    role = role.strip().lower() if isinstance(role, str) else role
    if not isinstance(role, str) or role not in _ROLE_OF:
        raise UserError(
            f"{where} has the role {excerpt(role)}; the roles are system, user (human), assistant (gpt), tool "
            "(observation) and function_call"
        )
    check_refused(fields, _REFUSED, where)
    kind = _ROLE_OF[role]
    learned = [_parse_flag(fields.pop(key), key, where) for key in LEARNED if key in fields]
    if _MASKED in fields:
        learned.append(not _parse_flag(fields.pop(_MASKED), _MASKED, where))
    # A weight of 0 at another turn says what holds anyway.
    if any(learned) and kind not in ("assistant", _CALL):
        raise UserError(f"{where} is a {kind} turn that is to be learned, and only answers are; take its weight out")
    listed = fields.pop("tool_calls", None)
    former = fields.pop("function_call", None)  # the one call of OpenAI's former format
    if listed is None and former is not None:
        listed = [former]
    if isinstance(listed, str):
        listed = from_json(listed, "tool_calls", where)
    calls = (
        [_parse_call(call, "tool_calls", where) for call in as_list(listed, "tool_calls", where)]
        if listed is not None
        else []
    )
    if kind == _CALL:
        calls = _parse_calls(content, "content", where)
        content = ""
    elif content is None and calls:
        content = ""
    text, reasoning, calls_in_parts = _parse_content(content, where)
    calls += calls_in_parts
    template_fields = {key: value for key, value in fields.items() if _is_json(value)}
    if reasoning:
        # A key of the message itself takes precedence over its parts.
        template_fields.setdefault("reasoning_content", reasoning)
    if calls:
        template_fields["tool_calls"] = calls
    return kind, Turn("assistant" if kind == _CALL else kind, text, template_fields, is_learned=all(learned))


def is_learned(row: Mapping[str, Any], source: str) -> bool:
    """Return whether a row is to be learned by its keys `weight` and `train`, if it has them."""
    # A list and not a generator, so that a malformed flag behind a false one is an error too.
    return all([_parse_flag(row[key], key, source) for key in ("weight", "train") if key in row])


def _parse_flag(value: object, key: str, where: str) -> bool:
    # True and False, and 0.0 and 1.0, are equal to these numbers.
    number = IN_WORDS.get(value.strip().lower()) if isinstance(value, str) else value
    if number not in (0, 1):
        raise UserError(f'{where}: "{key}" is {excerpt(value)}; give 1 to learn it, 0 not to')
    return bool(number)


def check_refused(fields: Mapping[str, Any], refused: Mapping[str, str], where: str) -> None:
    """Raise a UserError for the first of the refused keys that has a value; an empty value changes nothing."""
    for key, why in refused.items():
        value = fields.get(key)
        if value is not None and value is not False and not (hasattr(value, "__len__") and len(value) == 0):
            raise UserError(f'{where}: "{key}" ({excerpt(value)}) {why}; take it out, or the whole row')


def _parse_content(content: object, where: str) -> tuple[str, str, list[dict[str, Any]]]:
    """Return the text of a message, its reasoning, and its calls of tools; where it has parts, those of each kind.

    OpenAI's parts have their text under the key `text`, LLaMA-Factory's under `value`, and TRL's reasoning under
    `thinking`.
    """
    if isinstance(content, str):
        return content, "", []
    if not is_list(content) or not len(content):
        raise UserError(f"{where} has the content {excerpt(content)}, not a string; quote it or leave the row out")
    texts: dict[str, list[str]] = {kind: [] for kind in _PARTS}
    for part in content:
        values = part if isinstance(part, Mapping) else {"text": part}
        name = values.get("type", "text")
        kind = next((kind for kind, names in _PARTS.items() if name in names), None)
        text = next((values[key] for key in ("text", "value", "thinking") if values.get(key) is not None), None)
        if kind is None or not isinstance(text, str):
            raise UserError(f"{where} has the part {excerpt(part)}, and only texts are read; leave the row out")
        texts[kind].append(text)
    calls = [call for text in texts["call"] for call in _parse_calls(text, "tool_call", where)]
    return "".join(texts["text"]), "".join(texts["reasoning"]), calls


def _parse_calls(value: object, key: str, where: str) -> list[dict[str, Any]]:
    """Return the calls of one call or a list of them, as objects or as a text of JSON."""
    calls = from_json(value, key, where) if isinstance(value, str) else value
    return [_parse_call(call, key, where) for call in (calls if is_list(calls) else [calls])]


def _parse_call(call: object, key: str, where: str) -> dict[str, Any]:
    """Return a call as chat templates take it: its function with a name, and the arguments as an object.

    OpenAI's format has the arguments as a text of JSON, from which templates would make JSON once more.
    """
    fields = {name: value for name, value in call.items() if value is not None} if isinstance(call, Mapping) else {}
    function = fields.get("function", fields)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f'{where}: "{key}" has {excerpt(call)}; give calls of a function with name and arguments')
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            read = parse_json(arguments)
        except json.JSONDecodeError:
            read = None
        # What a model wrote may be no JSON; the template gets it as it is.
        arguments = read if isinstance(read, dict) else arguments
    function = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    others = {name: value for name, value in fields.items() if name == "id" and "function" in fields}
    return {"type": "function", **others, "function": function}


def as_tools(value: object, key: str, source: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a row, given as a list or as a text of JSON, as chat templates take them.

    A function without the object around it that says so, as in LLaMA-Factory's sets and OpenAI's former format, gets
    it.
    """
    tools = from_json(value, key, source) if isinstance(value, str) else value
    parsed = []
    for tool in as_list(tools, key, source):
        if not isinstance(tool, Mapping):
            raise UserError(f'{source}: "{key}" has {excerpt(tool)}; give objects that describe functions')
        parameters: Any = tool.get("function", tool)
        for part in ("parameters", "properties"):
            parameters = parameters.get(part) if isinstance(parameters, Mapping) else None
        # Those of other tools, which a table gives to this one as nulls
        if isinstance(parameters, Mapping) and None in parameters.values():
            tool = without_nulls(tool)
        is_bare = "name" in tool and "function" not in tool and tool.get("type", "function") == "function"
        bare = {name: part for name, part in tool.items() if name != "type"}
        parsed.append({"type": "function", "function": bare} if is_bare else dict(tool))
    return tuple(parsed)


def from_json(text: object, key: str, where: str) -> Any:
    try:
        return _read_text(str(text))
    except json.JSONDecodeError as error:
        raise UserError(
            f'{where}: "{key}" is {excerpt(text)}, not JSON ({error.msg}); give a list of objects'
        ) from error


def _read_text(text: str) -> Any:
    """Read JSON, or what pandas and the datasets library write into a cell of CSV: values as Python has them, and
    arrays of numpy, which are called so inside of another value, and have no comma between two objects.
    """
    try:
        return parse_json(text)
    except json.JSONDecodeError:
        try:
            value = ast.literal_eval(_TEXT_GAP_OR_ARRAY.sub(_replace, text.strip()))
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two for deep nesting
            value = None
        if not isinstance(value, list | dict) or has_half_surrogate(value):
            raise
        return value


def _replace(match: re.Match[str]) -> str:
    return match["text"] or ("}, {" if match["gap"] else "")


def as_list(value: object, key: str, where: str) -> Sequence[Any]:
    if not is_list(value):
        raise UserError(f'{where}: "{key}" is {excerpt(value)}; give a list of objects')
    return value


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _is_json(value: object) -> bool:
    """Return whether a value is one of JSON, the only values that a template may read; a date of a table is none."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    return all(map(_is_json, value)) if is_list(value) else isinstance(value, str | bool | int | float | None)


def excerpt(value: object) -> str:
    """Return a value as JSON, its beginning if it is long."""
    text = value[:50] if isinstance(value, str) else value
    encoded = json.dumps(text, default=str)
    return encoded if len(encoded) <= 40 else encoded[:37] + "..."
