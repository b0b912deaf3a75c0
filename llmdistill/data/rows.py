"""Parses the rows of a data set as examples. A row has one of several formats, which its keys decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmdistill.data.chat_messages import (
    MEDIA,
    Messages,
    Turn,
    are_turns,
    as_texts,
    as_tools,
    as_turns,
    check_refused,
    excerpt,
    from_json,
    is_learned,
    is_list,
    parse_messages,
)
from llmdistill.data.examples import Example
from llmdistill.data.readers import by_lower_case, with_names
from llmdistill.errors import UserError

_ASKS = {
    "instruction": ("output", "response", "chosen", "completion"),
    "query": ("response", "output", "answer", "chosen"),
    "question": ("answer", "response", "output", "chosen"),
    "problem": ("solution", "answer", "response"),
}
"""The keys of an instruction, each with the keys of its answer, the first ones first."""
_ANSWERS = tuple(dict.fromkeys(key for keys in _ASKS.values() for key in keys))
_CHATS = ("messages", "conversations", "conversation")
_COMPLETIONS = ("completion", "response", "output", "chosen")
_SYSTEMS = ("system", "system_prompt", "system_message")
_TOOLS = ("tools", "functions")
_REASONING = ("reasoning_content", "reasoning", "thinking")

_CHOSEN = "chosen_messages"
"""What newer sets of LLaMA-Factory call `chosen`."""

FORMAT_KEYS = (*_ASKS, *_CHATS, "prompt", "chosen", _CHOSEN)
"""The keys of which a row has one at least."""

_REFUSED = {
    **{key: "is no text, and only texts are read" for key in MEDIA},
    "documents": "is what the answer is based on, and is not read; write it into the instruction",
}
_FOR_INSTRUCTIONS = dict.fromkeys(("history", *_REASONING), "belongs to an instruction; write it into the messages")
_WITHOUT_TEMPLATE = dict.fromkeys(
    ("input", "context", *_SYSTEMS, "history", *_TOOLS, *_REASONING, "chat_template_kwargs"),
    "has no place in a prompt without a template; give the prompt as a list of messages",
)
_CHOICES = {key: "is not read; write the choices into the question" for key in ("choices", "options")}
_NOT_READ = {
    **dict.fromkeys(("rejected", "rejected_response", "rejected_messages"), "only the chosen answer is learned"),
    **dict.fromkeys(("parallel_tool_calls", "tool_choice"), "no chat template reads it"),
}
"""Keys that can be left out safely, each with the reason."""
_LABELS = ("label", "kto_tag")
_IN_WORDS = {
    **dict.fromkeys(("true", "yes", "desirable", "good", "chosen"), True),
    **dict.fromkeys(("false", "no", "undesirable", "bad", "rejected"), False),
}
"""What a label says of an answer where it is a word, as in the cells of CSV. 1 and 0 may be those of classes."""
_SPECIAL = frozenset((*_REFUSED, *_WITHOUT_TEMPLATE, *_CHOICES, *_NOT_READ, *_LABELS, "weight", "train")) - {
    "input",
    "context",
}
"""Keys that change what a row means; most rows have none, and are parsed in half the time."""

_KEYS = by_lower_case(
    (*_ASKS, *_ANSWERS, *_CHATS, *_COMPLETIONS, _CHOSEN, "data", "prompt", "input", "context", "teacher", *_SPECIAL)
)
"""All keys that are read or refused, by lower case."""


class LeftOut(UserError):
    """A row is not learned, because it says so itself. Sets leave such rows out, and count them."""

    def __init__(self, source: str, why: str) -> None:
        super().__init__(f"{source}: the row is not learned, because {why}; take the row or the key out")
        self.why = why


def parse_rows(
    rows: Iterable[tuple[Mapping[str, Any], str]], left_out: Counter[str], *, needs_answer: bool = True
) -> Iterator[Example]:
    """Parse rows, each with its place, by `parse_row`, and leave out those that are not to be learned.

    `left_out` counts the rows that are left out, and the keys that can be ignored safely. Its keys are phrases with {}
    for the number.
    """
    for row, source in rows:
        try:
            yield parse_row(row, source, needs_answer=needs_answer, left_out=left_out)
        except LeftOut as error:
            left_out[f"{{}} rows ({error.why})"] += 1


def describe_left_out(left_out: Mapping[str, int]) -> str:
    """Return the counts of `parse_rows` as a sentence; empty if nothing was left out."""
    return f" Left out: {'; '.join(what.format(f'{count:,}') for what, count in left_out.items())}." if left_out else ""


def parse_row(
    row: Mapping[str, Any], source: str, *, needs_answer: bool = True, left_out: Counter[str] | None = None
) -> Example:
    """Parse the example in a row. A key whose value is null counts as missing, and the case of keys does not matter.
    docs/data.md has the table of all keys.

    - ``instruction``, optionally ``input`` or ``context``, and ``output`` or ``response``; also ``query`` and
      ``response``, ``question`` and ``answer``, ``problem`` and ``solution``. A ``prompt`` in the same row is ignored.
      With ``system``, ``history``, ``tools`` or another key that only a chat template has a place for, the instruction
      is the last user turn of a chat.
    - ``messages`` of role and content, or ShareGPT's ``conversations`` of from and value: the last assistant turn that
      is learned is the answer, the turns before it are the prompt, and the turns after it are left out. If no answer is
      needed, a list that does not end with an assistant turn is a prompt as a whole.
    - ``prompt`` and ``completion``, ``response`` or ``output``: strings, or lists of messages.
    - UltraChat's ``data``: a list of strings, of the user and the assistant in turn.

    In a row of preferences ``chosen`` is the answer. A row may have a string ``teacher``, the name of the teacher that
    it asks for. `left_out` counts the keys that were not read.

    Raises:
        LeftOut: the row is not to be learned (``label`` false, ``weight`` 0), and an answer is needed.
        UserError: a key is missing (the answer only if needs_answer), a value does not fit the format, or a key changes
            what the row means and is not read; the message begins with `source`, the place of the row.
    """
    # Tables give each row all columns, with null where it has nothing.
    row = with_names({key: value for key, value in row.items() if value is not None}, _KEYS, source)
    if _CHOSEN in row and "chosen" not in row:
        row = {**row, "chosen": row[_CHOSEN]}
    is_plain = _SPECIAL.isdisjoint(row)
    if not is_plain:
        check_refused(row, _REFUSED, source)
    example, teacher = _parse_format(row, source, needs_answer), row.get("teacher")
    if needs_answer and not is_plain:
        for key in (key for key in _LABELS if key in row):  # KTO's sets label each answer as good or bad
            label = row[key]
            if isinstance(label, str):
                label = _IN_WORDS.get(label.strip().lower())
            # `is`, because 0 equals False, and 0 and 1 may be the numbers of classes.
            if label is False:
                raise LeftOut(source, f"{key} is false")
            if label is not True:
                raise UserError(
                    f'{source}: "{key}" is {excerpt(row[key])}; say by true or false whether the answer is good (KTO), '
                    "or take the key out"
                )
        if not is_learned(row, source):
            raise LeftOut(source, "its weight is 0")
    if left_out is not None and not (example.messages and not example.chat_key):
        present = [key for key in _ANSWERS if key in row]
        for key in present if len(present) > 1 else ():
            if row[key] and row[key] not in (list(example.outputs), *example.outputs):
                left_out[f"{key} of {{}} rows (another answer of the row is learned)"] += 1
    if left_out is not None and not is_plain:
        for key, why in _NOT_READ.items():
            if key in row:
                left_out[f"{key} of {{}} rows ({why})"] += 1
        tools = (as_tools(row[key], key, source) for key in _TOOLS if row.get(key))
        if example.messages and not example.tools and any(tools):
            left_out["tools of {} rows (the system turn describes them)"] += 1
    return replace(example, teacher=teacher) if isinstance(teacher, str) else example


def _parse_format(row: Mapping[str, Any], source: str, needs_answer: bool) -> Example:
    chat, instruction_key = _first_key(row, _CHATS), _first_key(row, tuple(_ASKS))
    if "data" in row and not any(key in row for key in FORMAT_KEYS) and (texts := as_texts(row["data"])):
        turns = [Turn("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
        return _parse_chat(row, tuple(turns), "data", source, needs_answer)
    # An instruction with its answer takes precedence over a chat; a question may stand beside one.
    if instruction_key == "instruction" and (chat is None or _first_key(row, _ASKS[instruction_key]) is not None):
        return _parse_instruction(row, instruction_key, source, needs_answer)
    if chat is not None:
        value = as_turns(row[chat])
        messages = parse_messages(from_json(value, chat, source) if isinstance(value, str) else value, chat, source)
        chosen = as_turns(row.get("chosen"))
        if chosen is None or messages[-1].role == "assistant":
            return _parse_chat(row, messages, chat, source, needs_answer)
        if isinstance(chosen, str):
            return _parse_chat(row, messages, chat, source, needs_answer, answers=(chosen,))
        answer = parse_messages(chosen if is_list(chosen) else [chosen], "chosen", source)
        _find_last_answer(answer, "chosen", source)  # raises if there is none
        return _parse_chat(row, messages + answer, chat, source, needs_answer)
    if "prompt" in row:
        return _parse_prompt(row, source, needs_answer)
    if instruction_key is not None:
        return _parse_instruction(row, instruction_key, source, needs_answer)
    if is_list(chosen := as_turns(row.get("chosen"))):
        return _parse_chat(row, parse_messages(chosen, "chosen", source), "chosen", source, needs_answer)
    text = "; a corpus of texts is read with --data.kind text" if "text" in row else ""
    raise UserError(
        f'{source}: the key "instruction" is missing (there are {sorted(row)}); add it, or use another format: query '
        "and response, question and answer, problem and solution, prompt and completion, messages, or conversations"
        + text
    )


def _parse_instruction(row: Mapping[str, Any], key: str, source: str, needs_answer: bool) -> Example:
    if key != "instruction":
        check_refused(row, _CHOICES, source)
    instruction = _read_string(row, key, source, "quote it")
    contexts = [
        _read_string(row, name, source, "quote it or leave it out") for name in ("input", "context") if name in row
    ]
    # An empty context beside an input says nothing, and does no harm.
    if all(contexts) and len(contexts) == 2:
        raise UserError(f'{source}: both "input" and "context" have a text, and one is read; join them')
    answers = _read_answers(row, _ASKS[key], source, needs_answer)
    example = Example(instruction, "".join(contexts), answers, source)
    if _SPECIAL.isdisjoint(row):
        return example
    system = _read_system(row, source)
    turns: list[Turn] = []
    history_value = row.get("history") or ()
    pairs = from_json(history_value, "history", source) if isinstance(history_value, str) else history_value
    for pair in pairs if is_list(pairs) else (pairs,):
        if not is_list(pair) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise UserError(f'{source}: "history" has {excerpt(pair)}; give pairs of a question and its answer')
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    history = tuple(turns)
    fields = {name: _read_string(row, name, source, "quote it") for name in _REASONING if row.get(name)}
    tools, options = _read_tools(row, system, source), _read_options(row, source)
    only_in_chats = {"system": system, "history": history, **fields, "tools": tools, "chat_template_kwargs": options}
    chat_key = next((name for name, value in only_in_chats.items() if value), "")
    if not chat_key:
        return example
    return Example(
        instruction="",
        input="",
        outputs=answers,
        source=source,
        messages=(*system, *history, example.user_turn()),
        answer_fields=fields,
        tools=tools,
        template_options=options,
        chat_key=chat_key,
    )


def _parse_prompt(row: Mapping[str, Any], source: str, needs_answer: bool) -> Example:
    # Where the prompt is plain text, an answer may itself be a list in JSON, so only "chosen" is read as a chat then.
    prompt_turns = as_turns(row["prompt"])
    keys = ("prompt", *_COMPLETIONS) if are_turns(prompt_turns) else ("chosen",)
    row = {**row, **{key: as_turns(row[key]) for key in keys if key in row}}
    key = _first_key(row, _COMPLETIONS)
    completion = None
    if key is not None and is_list(row[key]) and any(isinstance(turn, Mapping) for turn in row[key]):
        completion = parse_messages(row[key], key, source)
    if key == "chosen" and completion is not None and completion[0].role in ("system", "user"):
        return _parse_chat(row, completion, key, source, needs_answer)  # it holds the prompt too
    if not is_list(row["prompt"]):
        prompt = _read_string(row, "prompt", source, "give a string, or a list of messages with role and content")
        if not prompt:
            raise UserError(f'{source}: "prompt" is empty; give a text that the completion follows')
        check_refused(row, _WITHOUT_TEMPLATE, source)
        return Example("", "", _read_answers(row, _COMPLETIONS, source, needs_answer), source, raw_prompt=prompt)
    # Prompt and answer are parsed separately, so that an assistant turn of the prompt never becomes the answer; such a
    # turn is context, and not learned.
    turns = parse_messages(row["prompt"], "prompt", source)
    before = tuple(replace(turn, is_learned=False) if turn.role == "assistant" else turn for turn in turns)
    if completion is None:
        answers = _read_answers(row, _COMPLETIONS, source, needs_answer)
        return _parse_chat(row, before, "prompt", source, needs_answer, answers=answers)
    assert key is not None
    _find_last_answer(completion, key, source)
    return _parse_chat(row, before + completion, key, source, needs_answer)


def _parse_chat(
    row: Mapping[str, Any],
    messages: Messages,
    key: str,
    source: str,
    needs_answer: bool,
    *,
    answers: tuple[str, ...] | None = None,
) -> Example:
    """Return the example of a chat: its answer is the last assistant turn that is learned, unless `answers` is set."""
    check_refused(row, _FOR_INSTRUCTIONS, source)
    system = _read_system(row, source)
    if system and messages[0].role != "system":
        messages = system + messages
    elif system and messages[0].content != system[0].content:
        raise UserError(f'{source}: "{key}" begins with another system turn than the row\'s "system"; leave one out')
    fields: Mapping[str, Any] = {}
    if answers is None and not needs_answer and messages[-1].role != "assistant":
        answers = ()
    elif answers is None:
        last = _find_last_answer(messages, key, source, is_needed=needs_answer)
        if last == 0:
            raise UserError(f'{source}: "{key}" starts with its only answer; put a user turn in front of it')
        answers, fields, messages = (messages[last].content,), messages[last].fields, messages[:last]
    return Example(
        instruction="",
        input="",
        outputs=answers,
        source=source,
        messages=messages,
        answer_fields=fields,
        tools=_read_tools(row, messages, source),
        template_options=_read_options(row, source),
    )


def _find_last_answer(messages: Messages, key: str, source: str, *, is_needed: bool = True) -> int:
    """Return the index of the last assistant turn that is learned, or of the last one if no answer is needed."""
    places = [place for place, turn in enumerate(messages) if turn.role == "assistant"]
    if not places:
        raise UserError(f'{source}: "{key}" has no assistant turn, so there is no answer; add one')
    learned = [place for place in places if messages[place].is_learned]
    if not learned and is_needed:
        raise LeftOut(source, "none of its turns is learned")
    return (learned or places)[-1]


def _read_answers(row: Mapping[str, Any], keys: tuple[str, ...], source: str, needed: bool) -> tuple[str, ...]:
    key = _first_key(row, keys)
    if key is None:
        if needed:
            raise UserError(f'{source}: the key "{keys[0]}" is missing (there are {sorted(row)}); add it')
        return ()
    answers = row[key] if is_list(row[key]) else [row[key]]
    if (needed and not answers) or not all(isinstance(answer, str) for answer in answers):
        raise UserError(f'{source}: "{key}" is {excerpt(row[key])}; give a string or a list of strings')
    return tuple(answers)


def _read_system(row: Mapping[str, Any], source: str) -> Messages:
    # A set, because one text under two keys is one system prompt.
    texts = {_read_string(row, key, source, "quote it") for key in _SYSTEMS if row.get(key)}
    if len(texts) > 1:
        raise UserError(f"{source}: there are two system prompts, under two of {', '.join(_SYSTEMS)}; leave one out")
    return tuple(Turn("system", text) for text in texts)


def _read_tools(row: Mapping[str, Any], messages: Messages, source: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools for the chat template; none if the system turn already describes them (Hermes)."""
    key = next((key for key in _TOOLS if row.get(key)), None)
    if key is None or any(turn.role == "system" and "<tools>" in turn.content for turn in messages):
        return ()
    return as_tools(row[key], key, source)


def _read_options(row: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    cell = row.get("chat_template_kwargs") or {}
    options = from_json(cell, "chat_template_kwargs", source) if isinstance(cell, str) else cell
    if not isinstance(options, Mapping):
        raise UserError(f'{source}: "chat_template_kwargs" is {excerpt(cell)}; give an object')
    return {key: value for key, value in options.items() if value is not None}


def _read_string(row: Mapping[str, Any], key: str, source: str, remedy: str) -> str:
    if not isinstance(row[key], str):
        raise UserError(f'{source}: "{key}" is {excerpt(row[key])}, not a string; {remedy}')
    return str(row[key])


def _first_key(row: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if key in row), None)
