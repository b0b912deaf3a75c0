"""Parses one row of a data set as an example. A row has one of three forms, which its keys decide."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError

_OUTPUTS = ("output", "response")
_COMPLETIONS = ("completion", "response", "output")
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


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
        """The message as `apply_chat_template` takes it."""
        return {"role": self.role, "content": self.content, **self.fields}


Messages = tuple[Turn, ...]


@dataclass(frozen=True)
class Example:
    """One prompt with its answers, in one of three forms: an instruction, a prompt without template, or messages."""

    instruction: str
    """The instruction; empty in the other two forms."""
    input: str
    """Further context of the instruction; empty if there is none."""
    outputs: tuple[str, ...]
    """The reference answers; training uses the first, scoring takes the best match. Empty only for generation, which
    needs no answer."""
    source: str = field(default="", compare=False)
    """The place of the example, as ``file:line``; only for messages to the user."""
    messages: Messages = ()
    """The turns before the answer, for the tokenizer's chat template; empty in the other two forms. Assistant turns
    among them are answers too."""
    answer_fields: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the answer's message beside role and content, as `Turn.fields`; only for messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the chat template describes to the model; only for messages."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template (``chat_template_kwargs``), such as enable_thinking."""
    raw_prompt: str | None = None
    """A prompt that is used as it is, without any template; None in the other two forms."""
    teacher: str = ""
    """The name of the teacher that the row asks for; empty if it names none."""


def all_empty(examples: Sequence[Example]) -> bool:
    return not any(output.strip() for example in examples for output in example.outputs)


def no_answer(name: str | Path, count: int, *, which: str = "all") -> UserError:
    """The error for a data set whose answers are all empty, or those of the first examples, which were read so far."""
    return UserError(
        f"{name}: the answers of {which} {count} examples are empty, so nothing but the end of an answer is there to "
        "learn or to compare with; look at the key of the answers (output, completion, response or messages)"
    )


def parse_row(row: Mapping[str, Any], source: str, *, needs_answer: bool = True) -> Example:
    """Parse the example in a row. A key whose value is null counts as missing, and keys of no form are ignored.

    - ``instruction``, optionally ``input`` or ``context``, and ``output`` or ``response``; a ``prompt`` in the same row
      is ignored.
    - ``messages`` of role and content, or ShareGPT's ``conversations`` of from and value: the last assistant turn is
      the answer, the turns before it are the prompt, and the turns after it are left out. If no answer is needed, a
      list that does not end with an assistant turn is a prompt as a whole.
    - ``prompt`` and ``completion``, ``response`` or ``output``: strings, or lists of messages.

    Each form may have a string ``teacher``, the name of the teacher that the row asks for.

    Raises:
        UserError: a key is missing (the answer only if needs_answer), or a value does not fit the form; the message
            begins with `source`, the place of the row.
    """
    row = {key: value for key, value in row.items() if value is not None}
    example, teacher = _example(row, source, needs_answer), row.get("teacher")
    return replace(example, teacher=teacher) if isinstance(teacher, str) else example


def _example(row: dict[str, Any], source: str, needs_answer: bool) -> Example:
    if "instruction" in row:
        instruction = _string(row, "instruction", source, "quote it")
        context = _first(row, ("input", "context"))
        extra = "" if context is None else _string(row, context, source, "quote it or leave it out")
        return Example(instruction, extra, _answers(row, _OUTPUTS, source, needs_answer), source)
    conversation = _first(row, ("messages", "conversations"))
    if conversation is not None:
        messages = _messages(row[conversation], conversation, source)
        if not needs_answer and messages[-1].role != "assistant":
            return Example("", "", (), source, messages)
        return _before_last_answer(messages, conversation, source)
    if "prompt" in row:
        return _from_prompt(row, source, needs_answer)
    raise _missing("instruction", row, source)


def _from_prompt(row: Mapping[str, Any], source: str, needs_answer: bool) -> Example:
    if not isinstance(row["prompt"], list):
        prompt = _string(row, "prompt", source, "give a string, or a list of messages with role and content")
        if not prompt:
            raise UserError(f'{source}: "prompt" is empty; give a text that the completion follows')
        return Example("", "", _answers(row, _COMPLETIONS, source, needs_answer), source, raw_prompt=prompt)
    prompt_messages = _messages(row["prompt"], "prompt", source)
    key = _first(row, _COMPLETIONS)
    if key is not None and isinstance(row[key], list) and any(isinstance(turn, dict) for turn in row[key]):
        completion = _messages(row[key], key, source)
        # Prompt and answer are checked separately, so that an assistant turn of the prompt is never taken as the
        # answer.
        _last_answer(completion, key, source)
        return _before_last_answer(prompt_messages + completion, key, source)
    return Example("", "", _answers(row, _COMPLETIONS, source, needs_answer), source, prompt_messages)


def _answers(row: Mapping[str, Any], keys: tuple[str, ...], source: str, needed: bool) -> tuple[str, ...]:
    key = _first(row, keys)
    if key is None:
        if needed:
            raise _missing(keys[0], row, source)
        return ()
    answers = row[key] if isinstance(row[key], list) else [row[key]]
    if (needed and not answers) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f'{source}: "{key}" is {_shown(row[key])}; give a string or a list of strings')
    return tuple(answers)


def _messages(value: object, key: str, source: str) -> Messages:
    if not isinstance(value, list) or not value:
        raise UserError(f'{source}: "{key}" is {_shown(value)}; give a list of messages with role and content')
    return tuple(_message(turn, f'{source}: message {place} of "{key}"') for place, turn in enumerate(value, start=1))


def _message(turn: object, where: str) -> Turn:
    if not isinstance(turn, dict):
        raise UserError(f"{where} is {_shown(turn)}; give an object with role and content")
    role, content = (turn.get(key, turn.get(other)) for key, other in (("role", "from"), ("content", "value")))
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(f"{where} has the role {_shown(role)}; the roles are system, user (human) and assistant (gpt)")
    if not isinstance(content, str):
        raise UserError(f"{where} has the content {_shown(content)}, not a string; quote it or leave the row out")
    return Turn(_ROLES[role], content)


def _before_last_answer(messages: Messages, key: str, source: str) -> Example:
    last = _last_answer(messages, key, source)
    if last == 0:
        raise UserError(f'{source}: "{key}" starts with its only answer; put a user turn in front of it')
    return Example("", "", (messages[last].content,), source, messages[:last])


def _last_answer(messages: Messages, key: str, source: str) -> int:
    places = [place for place, turn in enumerate(messages) if turn.role == "assistant"]
    if not places:
        raise UserError(f'{source}: "{key}" has no assistant turn, so there is no answer; add one')
    return places[-1]


def _string(row: Mapping[str, Any], key: str, source: str, remedy: str) -> str:
    if not isinstance(row[key], str):
        raise UserError(f'{source}: "{key}" is {_shown(row[key])}, not a string; {remedy}')
    return str(row[key])


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in row), None)


def _missing(key: str, row: Mapping[str, Any], source: str) -> UserError:
    return UserError(f'{source}: the key "{key}" is missing (there are {sorted(row)}); add it')


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
