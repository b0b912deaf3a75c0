"""Renders chats by the tokenizer's chat template: the text that a model is asked, and the parts that are learned.

What is learned of an answer is what the template writes in its place in the whole chat: with an empty block of
reasoning before it, trimmed, in channels, up to the end of the turn. Templates are programs, so all of this is found by
comparing what they write: of a chat with and without its answer, and once per template of two chats of made-up texts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count, pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from llmdistill.data.examples import Example, Turn
from llmdistill.errors import UserError
from llmdistill.messages import logger

Turns = Literal["all", "last"]
Message = dict[str, Any]

_QUESTION, _ANSWER, _OTHER_ANSWER, _REASONING = "xq7", "yr8", "zs9", "wp6"
"""Made-up texts, which begin and end differently, so that a comparison ends where a text does."""
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class AnsweredChat:
    """A chat with its answer as the template renders it."""

    text: str
    learned: list[tuple[int, int]]
    """The characters from and up to which the text is learned, in order; of a template with generation marks, within
    which its marks are learned. Empty if the template does not write the answer."""
    prompts: list[str]
    """The text that a model is asked before each answer that is learned."""
    is_marked: bool
    """Whether the template marks what is learned ({% generation %})."""
    has_end: bool
    """Whether the template writes an end after the last answer; without one, `end_of_turn` is to be appended."""
    messages: list[Message]
    """As the template reads them."""
    options: Mapping[str, Any]
    """Further arguments of the template."""


@dataclass(frozen=True)
class _Frame:
    """What a template writes around the texts of a chat."""

    header: str = ""
    """Begins the turn of the assistant, if the template does not do so for add_generation_prompt."""
    prompt: str = ""
    """Begins the turn of the assistant in a prompt, such as ``<|im_start|>assistant\\n<think>\\n``."""
    tail: str = ""
    """All that follows the last answer, such as ``<|im_end|>\\n``."""
    last: str = ""
    """The end of the last turn, such as ``<|im_end|>``; empty if the template writes none."""
    inner: str = ""
    """The end of an older turn of the assistant; not always that of the last one (gpt-oss)."""
    separator: str = ""
    """From the end of an older answer to the next text of the user, which begins with `inner`."""
    opening: str = ""
    """The token that begins the next turn, which is the end of a turn if the template writes no other (GLM)."""
    writes_answers: bool = True
    plain: str = ""
    """Between a prompt and its answer without reasoning, such as ``<|channel|>final<|message|>``."""
    before_reasoning: str = ""
    """Between a prompt and its reasoning."""
    after_reasoning: str = ""
    """Between reasoning and the answer, such as ``\n</think>\n\n``; empty if the template has no reasoning."""
    reasoning_key: str | None = None
    """The key of a message under which the template reads reasoning; None if it reads none."""


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
    return [_prompt(_checked(each, tokenizer), _messages(each.messages), each) for each in examples]


def render_answered(example: Example, tokenizer: PreTrainedTokenizerBase, turns: Turns) -> AnsweredChat:
    """Return the messages of an example with its first answer, and the answers in it that are learned.

    Raises:
        UserError: as in `render_chats`.
    """
    answer = Turn("assistant", example.outputs[0], example.answer_fields)
    chat = _Chat(example, _checked(example, tokenizer), _messages([*example.messages, answer]))
    last = len(example.messages)
    older = [place for place, turn in enumerate(example.messages) if turn.role == "assistant"]
    learned = [place for place in older if example.messages[place].is_learned] if turns == "all" else []
    if not chat.frame.writes_answers:
        return chat.answered([], [last], is_marked=False, has_end=True)
    if _is_marked(tokenizer, example):
        # The marks say what is learned, within the answers that are to be.
        parts = [(0, len(chat.text))] if learned == older else [chat.region(place) for place in [*learned, last]]
        return chat.answered(parts, [*learned, last], is_marked=True, has_end=True)
    begin = chat.begin(last)
    end, has_end = chat.end_of_last(begin)
    if begin >= end and answer.content.strip():
        return chat.answered([], [last], is_marked=False, has_end=True)
    try:
        parts = [part for place in learned for part in chat.parts(place)]
        if any(stop > start for (_, stop), (start, _) in pairwise([*parts, (begin, end)])):
            raise _Unclear
    except (_Unclear, UserError):  # a template may refuse the beginning of a conversation
        _warn_once(
            "the tokenizer's chat template does not show where the earlier answers of a conversation begin and end: of "
            "such a conversation the last answer alone is learned (data.turns=last)"
        )
        learned, parts = [], []
    return chat.answered([*parts, (begin, end)], [*learned, last], is_marked=False, has_end=has_end)


@dataclass
class _Chat:
    """A chat that ends with an answer, and how the template renders parts of it."""

    example: Example
    tokenizer: PreTrainedTokenizerBase
    messages: list[Message]
    text: str = field(init=False)
    frame: _Frame = field(init=False)
    _prompts: dict[int, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.text = self._rendered(self.messages)
        self.frame = _frame(self.tokenizer, self.example)

    def answered(
        self, parts: list[tuple[int, int]], places: Sequence[int], *, is_marked: bool, has_end: bool
    ) -> AnsweredChat:
        prompts = []
        for place in places[:-1]:
            with suppress(UserError):  # a template may refuse the beginning of a conversation
                prompts.append(self.prompt(place))
        prompts.append(self.prompt(places[-1]))
        messages = as_the_template_reads(self.messages, self.tokenizer)
        return AnsweredChat(self.text, parts, prompts, is_marked, has_end, messages, _options(self.example))

    def prompt(self, place: int) -> str:
        """What a model is asked before the message at this place."""
        if place not in self._prompts:
            self._prompts[place] = _prompt(self.tokenizer, self.messages[:place], self.example)
        return self._prompts[place]

    def begin(self, place: int) -> int:
        """Where the answer at this place begins in the text: after the prompt, if the text begins with it."""
        prompt = self.prompt(place)
        if self.text.startswith(prompt):
            return len(prompt)
        if place == len(self.messages) - 1:
            _warn_once(
                "what the tokenizer's chat template writes of a conversation does not begin with the prompt that it "
                "writes for it (add_generation_prompt): what it writes of the whole conversation is learned"
            )
        # Two other answers show what the template writes before any of them.
        before, after = self.messages[:place], self.messages[place + 1 :]
        others = [
            self._rendered([*before, {"role": "assistant", "content": content}, *after])
            for content in (_ANSWER, _OTHER_ANSWER)
        ]
        answer = shared_length(self.text, *others)
        common = shared_length(self.text, prompt)
        if common >= len(prompt) - len(self.frame.prompt):
            return min(common, answer)
        # The messages before it are rendered in another way now. Its header is as ever, or else is not learned either.
        header = self.text.rfind(self.frame.prompt, 0, answer) if self.frame.prompt else -1
        contents = (each["content"] for each in self.messages[:place] if each["content"])
        previous = max((self.text.rfind(content, 0, answer) for content in contents), default=0)
        return header + len(self.frame.prompt) if header >= previous >= 0 else answer

    def end_of_last(self, begin: int) -> tuple[int, bool]:
        """Where the last turn ends in the text, and whether the template writes an end."""
        tail, last = self.frame.tail, self.frame.last
        if last and self.text.endswith(tail) and len(self.text) - len(tail) >= begin:
            return len(self.text) - len(tail) + len(last), True
        whole = self.text.rstrip()
        # Such as <|call|>, where the answer is a call of a tool.
        is_other = any(whole.endswith(each.content) for each in self.tokenizer.added_tokens_decoder.values())
        return (len(whole), True) if last and is_other and len(whole) > begin else (len(self.text), False)

    def parts(self, place: int) -> list[tuple[int, int]]:
        """The characters from and up to which an older answer is written, with the end of its turn: nearly always in
        one part.
        """
        begin, message = self.begin(place), self.messages[place]
        content = str(message["content"]).strip()
        following_answer = next(n for n in count(place + 1) if self.messages[n]["role"] == "assistant")
        limit = max(begin, self.begin(following_answer))
        written = self.text.find(content, begin, limit)
        answered = begin if written < 0 else written + len(content)
        if self.frame.separator and self.messages[place + 1]["role"] == "user":
            found = self.text.find(self.frame.separator, answered)
            if found >= 0:
                return [(begin, found + len(self.frame.inner))]
        if end := self._end(place, message, begin, answered):
            return [(begin, end)]
        # Reasoning before a call of a tool may be left out once there are answers after it (gpt-oss).
        call: Message = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        if end := self._end(place, call, begin, answered):
            return [(begin, end)]
        # So may a text beside the call; or it is written behind the results of the tools (Gemma 4).
        silent = [{**each, "content": ""} for each in (message, call) if "tool_calls" in each]
        end = next((found for each in silent if (found := self._end(place, each, begin, begin))), 0)
        if end and written < 0:
            _warn_once(
                "the tokenizer's chat template leaves out what an earlier answer says beside its calls of tools: of "
                "such an answer the calls alone are learned"
            )
            return [(begin, end)]
        if end and end <= written:
            rest = self.text[written:limit].removesuffix(self.frame.prompt).rstrip()
            return [(begin, end), (written, written + max(len(content), len(rest)))]
        raise _Unclear

    def _end(self, place: int, message: Message, begin: int, answered: int) -> int:
        """Where an older answer ends that is rendered as this message while nothing is after it; 0 if unclear."""
        # Whoever is next, the text is equal up to the header of the next turn. A turn of the user after it may change
        # the turn itself, as reasoning is left out before it.
        until, question = [*self.messages[:place], message], {"role": "user", "content": _QUESTION}
        for next_header, following in (
            (self.frame.prompt, lambda: _prompt(self.tokenizer, until, self.example)),
            (self.frame.separator[len(self.frame.inner) :].lstrip(), lambda: self._rendered([*until, question])),
        ):
            equal = self.text[: shared_length(self.text, following())]
            end = len(_without_overlap(_whole(equal), next_header).rstrip())
            if end > begin and end >= answered:
                return end
        return 0

    def region(self, place: int) -> tuple[int, int]:
        """From the beginning of an answer to that of the next one, for templates that mark what is learned in it."""
        header = len(self.frame.prompt)  # which the marks of some templates include (gpt-oss)
        later = [n for n in range(place + 1, len(self.messages)) if self.messages[n]["role"] == "assistant"]
        end = self.begin(later[0]) - header if later else len(self.text)
        return max(0, self.begin(place) - header), max(0, end)

    def _rendered(self, messages: list[Message]) -> str:
        return _rendered(self.tokenizer, messages, self.example)


def read_reply(text: str, tokenizer: PreTrainedTokenizerBase, example: Example | None = None) -> Reply:
    """Split what was written after a prompt into the answer and its reasoning, in the form of the template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return Reply(text)
    frame = _frame(tokenizer, example)
    # A model does not always write the spaces around the marks.
    start = next((each for each in _with_and_without_spaces(frame.before_reasoning) if text.startswith(each)), None)
    if frame.after_reasoning and start is not None:
        end = next((each for each in _with_and_without_spaces(frame.after_reasoning) if each in text), None)
        # Reasoning without an end has no answer after it; but a prompt that begins it may be answered at once.
        if end or start:
            written = text[len(start) :]
            reasoning, _, content = written.partition(end) if end else (written, "", "")
            return Reply(content, {frame.reasoning_key: reasoning} if frame.reasoning_key else {}, is_read=True)
    if frame.plain and text.startswith(frame.plain):
        return Reply(text[len(frame.plain) :], is_read=True)
    thought = _THOUGHT.match(text)  # which a template without reasoning has as a part of the answer
    return Reply(text) if thought is None else Reply(text[thought.end() :], is_read=True)


def _with_and_without_spaces(text: str) -> tuple[str, str]:
    return text, text.strip()


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends an answer in a chat: what the chat template writes after it, else the end token.

    The two differ in some models, such as Gemma, whose turns end with <end_of_turn> and whose texts with <eos>. With
    GLM's template it is the token that begins the next turn. The end may be an ordinary token, but not several.
    """
    end: int = tokenizer.eos_token_id
    if getattr(tokenizer, "chat_template", None) is None:
        return end
    frame = _frame(tokenizer)
    last = frame.last or frame.opening
    ids: list[int] = tokenizer(last, add_special_tokens=False, verbose=False)["input_ids"] if last else []
    if len(ids) == 1:
        return ids[0]
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((index for index in ids if index in added), end)


def shared_length(*sequences: Sequence[Any]) -> int:
    """Return how far sequences are equal from their beginning."""
    whole: Any = sequences
    return len(os.path.commonprefix(whole))  # noqa: RUF071  # of any sequences, although it is among the paths


def _checked(example: Example, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None or tokenizer.chat_template is None:
        raise UserError(
            f"{place_of(example)}messages, but the tokenizer has no chat template; "
            "give one in tokenizer_config.json or rows of instruction, input, output"
        )
    return tokenizer


def _messages(turns: Sequence[Turn]) -> list[Message]:
    return [turn.as_message() for turn in turns]


def as_the_template_reads(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """Return messages with their texts as lists of parts for the roles of which the template writes no plain string.

    So are the templates of some models that see images too (Idefics, SmolVLM, LLaVA); others read both.
    """
    in_parts = _roles_in_parts(tokenizer, _template(tokenizer))
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if each["role"] in in_parts else each
        for each in messages
    ]


@lru_cache(maxsize=64)
def _roles_in_parts(tokenizer: PreTrainedTokenizerBase, _template: str) -> frozenset[str]:
    def writes(content: object, role: str, before: Sequence[Message], after: Sequence[Message] = ()) -> bool:
        chat = [*before, {"role": role, "content": content}, *after]
        with suppress(Exception):  # a template can raise anything
            return _ANSWER in str(tokenizer.apply_chat_template(chat, tokenize=False))
        return False

    def in_parts(role: str, *others: Sequence[Message]) -> bool:
        return not writes(_ANSWER, role, *others) and writes([{"type": "text", "text": _ANSWER}], role, *others)

    parts: Any = [{"type": "text", "text": _QUESTION}]
    found = {"user"} if in_parts("user", []) else set()
    asked = {"role": "user", "content": parts if found else _QUESTION}
    found |= {"assistant"} if in_parts("assistant", [asked]) else set()
    found |= {"system"} if in_parts("system", [], [asked]) else set()
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": parts if "assistant" in found else "", "tool_calls": [call]}
    found |= {"tool"} if in_parts("tool", [asked, calling]) else set()
    return frozenset(found)


def _options(example: Example) -> dict[str, Any]:
    return {**({"tools": [dict(tool) for tool in example.tools]} if example.tools else {}), **example.template_options}


def _prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message], example: Example) -> str:
    text = _rendered(tokenizer, messages, example, asks=True)
    return text + _frame(tokenizer, example).header


def _rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], example: Example, *, asks: bool = False
) -> str:
    options = {**_options(example), "add_generation_prompt": asks}
    try:
        return str(tokenizer.apply_chat_template(as_the_template_reads(messages, tokenizer), tokenize=False, **options))
    except Exception as error:  # a template can raise anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(
            f"{place_of(example)}the tokenizer's chat template refuses the messages ({reason}); change one of them"
        ) from error


def _frame(tokenizer: PreTrainedTokenizerBase, example: Example | None = None) -> _Frame:
    options = {} if example is None else dict(example.template_options)
    given = json.dumps(options, default=str) if options else "{}"
    return _frame_of(tokenizer, _template(tokenizer), tokenizer.eos_token, given)


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template)


@lru_cache(maxsize=64)
def _frame_of(tokenizer: PreTrainedTokenizerBase, _template: str, _end: str, options: str) -> _Frame:
    """Find what a template writes around texts by two chats; empty of a template that refuses them."""

    def rendered(*contents: str, asks: bool = False, **fields: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
        messages[-1] |= fields
        example = Example("", "", (), template_options=json.loads(options))
        return _rendered(tokenizer, messages, example, asks=asks)

    try:
        asked, plain = (rendered(_QUESTION, asks=each) for each in (True, False))
        answered, other = rendered(_QUESTION, _ANSWER), rendered(_QUESTION, _OTHER_ANSWER)
    except UserError:  # which is said of the chats themselves
        return _Frame()
    header, before = "", answered[: shared_length(answered, other)]
    if asked == plain and before.startswith(plain):
        # A space at its end would be a token of its own in a prompt, and is part of the first one of an answer.
        header = before[len(plain) :].rstrip(" ")
        header = header if header.strip() else ""
    prompt = header or asked[len(_whole(asked[: shared_length(asked, plain)])) :]
    tail = answered.rpartition(_ANSWER)[2]
    inner = separator = ""
    try:
        longer = rendered(_QUESTION, _ANSWER, _OTHER_ANSWER, _ANSWER)
        next_asked = rendered(_QUESTION, _ANSWER, asks=True)
    except UserError:
        pass
    else:
        separator = longer.partition(_ANSWER)[2].partition(_OTHER_ANSWER)[0]
        following = next_asked.rpartition(_ANSWER)[2] + header
        inner = _without_overlap(separator[: shared_length(separator, following)], prompt)
        # A template that begins the turn of the assistant in any case shows it nowhere apart.
        mark = re.search(r"(<[^<>]*>|\[[^\[\]]*\])$", inner)
        if mark and not prompt and mark[0] in longer.partition(_QUESTION)[0]:
            inner = inner[: mark.start()]
        inner = inner.rstrip()
    last = inner if inner and tail.startswith(inner) else _first_end(tail, tokenizer)
    special = (each.content for each in tokenizer.added_tokens_decoder.values() if each.special)
    opening = "" if last else max(filter(separator.startswith, special), key=len, default="")
    asked += header
    plain = answered[len(asked) :].partition(_ANSWER)[0] if answered.startswith(asked) else ""
    return _Frame(
        header,
        prompt,
        tail,
        last,
        inner or opening,
        separator,
        opening,
        writes_answers=_ANSWER in answered,
        plain=plain if plain.strip() else "",
        **_reasoning(asked, partial(rendered, _QUESTION, _ANSWER)),
    )


def _reasoning(asked: str, answered: Callable[..., str]) -> dict[str, Any]:
    """Find how a template writes the reasoning of an answer, which is rendered with the further keys of its message."""
    for key in ("reasoning_content", "thinking", "reasoning"):
        try:
            text = answered(**{key: _REASONING})
        except UserError:
            continue
        if text.startswith(asked) and _REASONING in text[len(asked) :]:
            before, _, after = text[len(asked) :].partition(_REASONING)
            return {
                "before_reasoning": before,
                "after_reasoning": after.partition(_ANSWER)[0],
                "reasoning_key": key,
            }
    # Of a prompt that begins reasoning, the template may leave it out of the whole conversation (DeepSeek-R1).
    mark = re.search(r"<(\w+)>\s*$", asked)
    return {"after_reasoning": f"</{mark[1]}>"} if mark else {}


def _first_end(tail: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The end of a turn in what follows the last answer: all up to a token that stands apart, as the <eos> of Phi-3."""
    tokens = "|".join(re.escape(each.content) for each in tokenizer.added_tokens_decoder.values() if each.content)
    apart = re.search(rf"(?<=\S)\s+(?:{tokens})+\s*$", tail) if tokens else None
    return (tail if apart is None else tail[: apart.start()]).rstrip()


def _whole(text: str) -> str:
    """Leave out a mark that has only begun at the end of a text, such as ``<|`` of ``<|user|>``."""
    return re.sub(r"[<\[{][^<>\[\]{}\s]*$", "", text)


def _without_overlap(text: str, following: str) -> str:
    """Leave out the end of a text with which `following` begins."""
    length = next(n for n in range(min(len(text), len(following)), -1, -1) if text.endswith(following[:n]))
    return text[: len(text) - length]


def _is_marked(tokenizer: PreTrainedTokenizerBase, example: Example) -> bool:
    """Whether the template that an example gets marks what is learned."""
    chosen = tokenizer.get_chat_template(None, [dict(tool) for tool in example.tools] or None)
    return _MARKED.search(chosen) is not None


@lru_cache
def _warn_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", text, extra={"framed": True})


def place_of(example: Example) -> str:
    return f"{example.source}: " if example.source else ""
