"""Renders chats with the tokenizer's chat template: the prompt of the model, and the parts of the text that it learns.

The model learns an answer as the template writes it in the whole chat: with an empty block of reasoning before it,
trimmed, in channels, up to the end of the turn. Templates are programs, so the only way to see where an answer begins
and ends is to compare renderings: of the chat with and without its answer, and, once per template, of two chats with
made-up texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.errors import UserError
from llmdistill.messages import warn_once
from llmdistill.models.chat_templates import (
    ANSWER,
    OTHER_ANSWER,
    QUESTION,
    REASONING_KEYS,
    Frame,
    Message,
    as_the_template_reads,
    frame_of,
    num_calls_written,
    render,
    shared_length,
    without_begun_mark,
    without_overlap,
    writes_tools,
)

Turns = Literal["all", "last"]

_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class AnsweredChat:
    """A chat with its answer as the template renders it."""

    text: str
    learned: list[tuple[int, int]]
    """The learned parts of the text, in order, each with its first character and the end; for a template with
    generation marks, the parts within which its marks count. Empty if the template does not write the answer."""
    prompts: list[str]
    """The prompt before each learned answer."""
    is_marked: bool
    """Whether the template marks what is learned ({% generation %})."""
    has_end: bool
    """Whether the template writes an end after the last answer; if not, the caller appends `end_of_turn`."""
    messages: list[Message]
    """As the template reads them."""
    options: Mapping[str, Any]
    """Further arguments of the template."""


@dataclass(frozen=True)
class Reply:
    """What a model has written in a chat, as the parts of a message."""

    content: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Its reasoning, by the key under which the template reads it."""
    is_read: bool = False
    """Whether the text has a form that the template writes around an answer."""


class _Unclear(Exception):
    """The template does not show where an older answer begins or ends."""


def render_chats(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Return the messages of each example as the text up to the beginning of the assistant's turn.

    transformers renders a template in jinja's sandbox, which has no files, commands or inner attributes.

    Raises:
        UserError: there is no chat template, or it raises an error.
    """
    prompts = []
    for example in examples:
        with_template, messages = _require_template(example, tokenizer), _as_messages(example.messages)
        prompts.append(_render_prompt(with_template, messages, example))
        if omission := _find_omission(with_template, messages, example, prompts[-1], _render_prompt):
            raise _left_out(omission, example)
    return prompts


def render_answered(example: Example, tokenizer: PreTrainedTokenizerBase, turns: Turns) -> AnsweredChat:
    """Return the messages of an example with its first answer, and the answers in it that are learned.

    Raises:
        UserError: as in `render_chats`.
    """
    answer = Turn("assistant", example.outputs[0], example.answer_fields)
    chat = _Chat(example, _require_template(example, tokenizer), _as_messages([*example.messages, answer]))
    last = len(example.messages)
    older = [place for place, turn in enumerate(example.messages) if turn.role == "assistant"]
    learned = [place for place in older if example.messages[place].is_learned] if turns == "all" else []
    if not chat.frame.writes_answers:  # the caller refuses an answer that is not learned
        return chat.finish([], [last], is_marked=False, has_end=True)
    if any(key in answer.fields for key in REASONING_KEYS) and not chat.frame.reasoning_key:
        warn_once(
            "the tokenizer's chat template leaves out the reasoning of answers, so that it is not learned; a template "
            "that writes it can be given in tokenizer_config.json"
        )
    if chat.is_marked:
        # The marks say what is learned, within the answers that are to be.
        parts = [(0, len(chat.text))] if learned == older else [chat.find_region(place) for place in [*learned, last]]
        return chat.finish(parts, [*learned, last], is_marked=True, has_end=True)
    begin = chat.find_begin(last)
    end, has_end = chat.find_end(begin)
    if begin >= end and answer.content.strip():
        return chat.finish([], [last], is_marked=False, has_end=True)
    try:
        parts = [part for place in learned for part in chat.find_parts(place)]
        # Answers that overlap: one of them was taken for another with the same words.
        if any(stop > start for (_, stop), (start, _) in pairwise([*parts, (begin, end)])):
            raise _Unclear
    except (_Unclear, UserError):  # a template may refuse the beginning of a conversation
        warn_once(
            "the tokenizer's chat template does not show where the earlier answers of a conversation begin and end: of "
            "such a conversation the last answer alone is learned (data.turns=last)"
        )
        learned, parts = [], []
    return chat.finish([*parts, (begin, end)], [*learned, last], is_marked=False, has_end=has_end)


def check_end_is_marked(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    """Warn once if the marks of a template leave out the end of the turn, of whose last answer these are the tokens."""
    last = frame_of(tokenizer).last.strip()
    # A call of a tool may have an end of its own, which is a token too.
    if not any(token in tokenizer.added_tokens_decoder for token in ids) and not (
        last and str(tokenizer.decode(ids)).rstrip().endswith(last)
    ):
        warn_once(
            "the {% generation %} marks of the chat template leave out the end of an answer, so that a student does "
            "not learn to stop; move {% endgeneration %} behind the token that ends a turn"
        )


@dataclass
class _Chat:
    """A chat that ends with an answer, and how the template renders parts of it."""

    example: Example
    tokenizer: PreTrainedTokenizerBase
    messages: list[Message]
    text: str = field(init=False)
    frame: Frame = field(init=False)
    _prompts: dict[int, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.text = self._render(self.messages)
        self.frame = frame_of(self.tokenizer, self.example.template_options)
        omission = _find_omission(self.tokenizer, self.messages, self.example, self.text, _render)
        if not omission:
            return
        # A template may write the system turn before the last question alone, and only if no answer follows (Mistral).
        # The answer is then learned behind its prompt.
        before = self.messages[:-1]
        if omission.place < len(before) and not self.is_marked:
            prompt = self.render_prompt(len(before))
            if not _find_omission(self.tokenizer, before, self.example, prompt, _render_prompt):
                self.text = prompt + self.text[self.find_begin(len(before)) :]
                return
        raise _left_out(omission, self.example)

    @property
    def is_marked(self) -> bool:
        """Whether the template marks what is learned."""
        tools = [dict(tool) for tool in self.example.tools] or None
        return _MARKED.search(self.tokenizer.get_chat_template(None, tools)) is not None

    def finish(
        self, parts: list[tuple[int, int]], places: Sequence[int], *, is_marked: bool, has_end: bool
    ) -> AnsweredChat:
        """Return the chat with its learned parts, and with the prompts before the answers at these places."""
        prompts = []
        for place in places[:-1]:
            with suppress(UserError):  # a template may refuse the beginning of a conversation
                prompts.append(self.render_prompt(place))
        prompts.append(self.render_prompt(places[-1]))
        messages = as_the_template_reads(self.messages, self.tokenizer)
        return AnsweredChat(self.text, parts, prompts, is_marked, has_end, messages, _template_options(self.example))

    def render_prompt(self, place: int) -> str:
        """Return the prompt that the message at this place answers."""
        if place not in self._prompts:
            self._prompts[place] = _render_prompt(self.tokenizer, self.messages[:place], self.example)
        return self._prompts[place]

    def find_begin(self, place: int) -> int:
        """Return where the answer at this place begins in the text: after the prompt, if the text begins with it."""
        prompt = self.render_prompt(place)
        if self.text.startswith(prompt):
            return len(prompt)
        if place == len(self.messages) - 1:
            warn_once(
                "what the tokenizer's chat template writes of a conversation does not begin with the prompt that it "
                "writes for it (add_generation_prompt): what it writes of the whole conversation is learned"
            )
        # The text that two made-up answers share with this one shows what the template writes before any answer.
        before, after = self.messages[:place], self.messages[place + 1 :]
        made_up = [{"role": "assistant", "content": content} for content in (ANSWER, OTHER_ANSWER)]
        try:
            others = [self._render([*before, other, *after]) for other in made_up]
        except UserError:  # a template may refuse results of tools behind an answer that called none
            users = (number for number, message in enumerate(after) if message["role"] == "user")
            after = after[next(users, len(after)) :]
            others = [self._render([*before, other, *after]) for other in made_up]
        answer = shared_length(self.text, *others)
        common = shared_length(self.text, prompt)
        # They differ in the header of the answer at most. A prompt may also go on with an answer (Nemotron Nano).
        before_it = str(self.messages[place - 1]["content"]).strip()
        goes_on = bool(before_it) and before_it in prompt[common:]
        if common >= len(prompt) - len(self.frame.prompt) and not goes_on:
            return min(common, answer)
        # The template renders the earlier messages differently once an answer follows. The answer then begins after its
        # header, or, where that header does not follow the earlier messages, at its first own character.
        header = self.text.rfind(self.frame.prompt, 0, answer) if self.frame.prompt else -1
        contents = (message["content"] for message in self.messages[:place] if message["content"])
        previous = max((self.text.rfind(content, 0, answer) for content in contents), default=0)
        if header >= previous >= 0:
            return header + len(self.frame.prompt)
        # A space before an answer belongs to it, as most tokenizers merge it into the first token.
        return answer if prompt[-1:].isspace() else len(self.text[:answer].rstrip(" "))

    def find_end(self, begin: int) -> tuple[int, bool]:
        """Return where the last turn ends in the text, and whether the template writes an end."""
        tail, last = self.frame.tail, self.frame.last
        if last and self.text.endswith(tail) and len(self.text) - len(tail) >= begin:
            return len(self.text) - len(tail) + len(last), True
        # A template that always begins the assistant's turn does so behind every end.
        stripped = self.text.removesuffix(tail[len(last) :]).rstrip()
        # A call of a tool may have an end of its own, such as <|call|> (gpt-oss).
        is_other = any(stripped.endswith(token.content) for token in self.tokenizer.added_tokens_decoder.values())
        if last and is_other and len(stripped) > begin:
            return len(stripped), True
        # A turn that the template writes behind every answer, and no end before it (a call in Command R+).
        if tail[len(last) :].strip() and len(begin_of_next := self.text.removesuffix(tail[len(last) :])) > begin:
            self.text = begin_of_next.rstrip()
        return len(self.text), False

    def find_parts(self, place: int) -> list[tuple[int, int]]:
        """Return where an older answer stands in the text, with the end of its turn: nearly always one part."""
        begin, message = self.find_begin(place), self.messages[place]
        content = str(message["content"]).strip()
        # There is always one: the last message of the chat is an answer.
        following_answer = next(n for n in count(place + 1) if self.messages[n]["role"] == "assistant")
        limit = max(begin, self.find_begin(following_answer))
        written = self.text.find(content, begin, limit)
        answered = begin if written < 0 else written + len(content)
        # What follows an answer without calls may be the definitions of tools and not the next turn (Mistral).
        if written >= 0 and self.frame.inner and "tool_calls" not in message:
            rest = self.text[answered:]
            for end in (answered, answered + len(rest) - len(rest.lstrip())):
                if self.text.startswith(self.frame.inner, end):
                    return [(begin, end + len(self.frame.inner))]
        if self.frame.separator and self.messages[place + 1]["role"] == "user":
            separator = self.text.find(self.frame.separator, answered, limit)
            if separator >= 0:
                return [(begin, separator + len(self.frame.inner))]
        if end := self._find_older_end(place, message, begin, answered):
            return [(begin, end)]
        # A template may leave out the reasoning before a call of a tool once answers follow (gpt-oss).
        call: Message = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        if end := self._find_older_end(place, call, begin, answered):
            return [(begin, end)]
        # It may also leave out the text beside the call, or write it behind the results of the tools (Gemma 4).
        if written >= 0 and (end := self._find_first_end(place, answered)):
            return [(begin, end)]
        silent = [{**candidate, "content": ""} for candidate in (message, call) if "tool_calls" in candidate]
        ends = (self._find_older_end(place, candidate, begin, begin) for candidate in silent)
        end = next((end for end in ends if end), 0) or (self._find_first_end(place, begin) if written < 0 else 0)
        if end and written < 0:
            warn_once(
                "the tokenizer's chat template leaves out what an earlier answer says beside its calls of tools: of "
                "such an answer the calls alone are learned"
            )
            return [(begin, end)]
        if end and end <= written:
            rest = self.text[written:limit].removesuffix(self.frame.prompt).rstrip()
            return [(begin, end), (written, written + max(len(content), len(rest)))]
        raise _Unclear

    def _find_older_end(self, place: int, message: Message, begin: int, answered: int) -> int:
        """Return where an older answer ends, if the template renders it as this message at the end of a chat; or 0."""
        # Whoever speaks next, both texts are equal up to the header of the next turn. Two renderings are tried, because
        # a turn of the user may change the answer before it: many templates then leave out its reasoning.
        until, question = [*self.messages[:place], message], {"role": "user", "content": QUESTION}
        for next_header, following in (
            (self.frame.prompt, lambda: _render_prompt(self.tokenizer, until, self.example)),
            (self.frame.separator[len(self.frame.inner) :].lstrip(), lambda: self._render([*until, question])),
        ):
            try:
                other = following()
            except UserError:  # a template may refuse a question right behind a call
                continue
            equal = self.text[: shared_length(self.text, other)]
            end = len(without_overlap(without_begun_mark(equal), next_header).rstrip())
            # The other rendering goes on with the next turn, unless it writes this answer itself in another way.
            rest = other[end:].strip()
            is_merged = self.messages[place + 1]["role"] == "assistant"
            goes_on = is_merged or not rest or rest.startswith(next_header.strip())
            if end > begin and end >= answered and goes_on:
                return end
        return 0

    def _find_first_end(self, place: int, answered: int) -> int:
        """Return where the first end of a turn ends between an older answer and the text of the next message; or 0."""
        if not self.frame.inner.strip():
            return 0
        following = {**self.messages[place + 1], "content": QUESTION}
        other = self._render([*self.messages[: place + 1], following, *self.messages[place + 2 :]])
        end = self.text.find(self.frame.inner, answered, shared_length(self.text, other))
        return end + len(self.frame.inner) if end >= 0 else 0

    def find_region(self, place: int) -> tuple[int, int]:
        """Return the part from one answer to the next, for templates that mark what is learned within it."""
        header = len(self.frame.prompt)  # which the marks of some templates include (gpt-oss)
        later = [n for n in range(place + 1, len(self.messages)) if self.messages[n]["role"] == "assistant"]
        end = self.find_begin(later[0]) - header if later else len(self.text)
        return max(0, self.find_begin(place) - header), max(0, end)

    def _render(self, messages: list[Message]) -> str:
        return _render(self.tokenizer, messages, self.example)


def read_reply(text: str, tokenizer: PreTrainedTokenizerBase, example: Example | None = None) -> Reply:
    """Split a model's text after a prompt into the answer and its reasoning, in the form of the template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return Reply(text)
    frame = frame_of(tokenizer, example.template_options if example else None)
    # Models do not always write the spaces around the marks of the template.
    start = next((mark for mark in _spaced_and_stripped(frame.before_reasoning) if text.startswith(mark)), None)
    if frame.after_reasoning and start is not None:
        end = next((mark for mark in _spaced_and_stripped(frame.after_reasoning) if mark in text), None)
        # Reasoning without an end has no answer after it; but a prompt that begins it may be answered at once.
        if end or start:
            written = text[len(start) :]
            reasoning, _, content = written.partition(end) if end else (written, "", "")
            return Reply(content, {frame.reasoning_key: reasoning} if frame.reasoning_key else {}, is_read=True)
    if frame.plain and text.startswith(frame.plain):
        return Reply(text[len(frame.plain) :], is_read=True)
    thought = _THOUGHT.match(text)  # which a template without reasoning has as a part of the answer
    return Reply(text) if thought is None else Reply(text[thought.end() :], is_read=True)


def _spaced_and_stripped(text: str) -> tuple[str, str]:
    return text, text.strip()


def _require_template(example: Example, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(
            f"{source_prefix(example)}messages, but the tokenizer has no chat template; "
            "give one in tokenizer_config.json or rows of instruction, input, output"
        )
    return tokenizer


def _as_messages(turns: Sequence[Turn]) -> list[Message]:
    return [turn.as_message() for turn in turns]


def _template_options(example: Example) -> dict[str, Any]:
    return {**({"tools": [dict(tool) for tool in example.tools]} if example.tools else {}), **example.template_options}


def _render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message], example: Example) -> str:
    text = _render(tokenizer, messages, example, asks=True)
    return text + frame_of(tokenizer, example.template_options).header


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], example: Example, *, asks: bool = False
) -> str:
    try:
        return render(tokenizer, messages, _template_options(example), asks=asks)
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{source_prefix(example)}the tokenizer's chat template refuses the messages ({reason}); change one of them"
        ) from error


class _Omission(NamedTuple):
    """What a template leaves out of a chat."""

    place: int
    """The message that it is a part of; -1 for the tools."""
    what: str


def _find_omission(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    example: Example,
    text: str,
    write: Callable[[PreTrainedTokenizerBase, list[Message], Example], str],
) -> _Omission | None:
    """Return the first part of a chat that the template leaves out of its text, so that changing it changes nothing.

    The parts are the tools, the texts of all but the assistant, and calls of tools. Answers are looked for where they
    are learned, and reasoning may be left out. `write` has made the text of the messages.
    """

    def is_read(changed: list[Message], example: Example = example) -> bool:
        try:
            return write(tokenizer, changed, example) != text
        except UserError:  # the template reads what it refuses
            return True

    options = example.template_options
    if example.tools and not writes_tools(tokenizer, options) and not is_read(messages, replace(example, tools=())):
        return _Omission(-1, "the tools of the row")
    for place, message in enumerate(messages):
        changed, what = None, ""
        calls = message.get("tool_calls") or ()
        if message["role"] != "assistant":
            if message["content"].strip() and message["content"].strip() not in text:
                changed, what = {**message, "content": QUESTION}, f"the text of a {message['role']} turn"
        elif len(calls) > num_calls_written(tokenizer, options):
            changed, what = {**message, "tool_calls": calls[:-1]}, "a call of a tool"
            if len(calls) == 1:
                del changed["tool_calls"]
        if changed is not None and not is_read([*messages[:place], changed, *messages[place + 1 :]]):
            return _Omission(place, what)
    return None


def _left_out(omission: _Omission, example: Example) -> UserError:
    return UserError(
        f"{source_prefix(example)}the tokenizer's chat template leaves out {omission.what}; give a template that "
        "writes it in tokenizer_config.json, or take it out of the row"
    )


def source_prefix(example: Example) -> str:
    return f"{example.source}: " if example.source else ""
