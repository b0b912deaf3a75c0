"""What a chat template writes around the texts of a chat, how a turn ends, and in which form it reads texts.

Templates are programs, so the only way to see this is to render chats of made-up texts, once per template, and to
compare the renderings.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from llmdistill.memo import cached_by

Message = dict[str, Any]

QUESTION, ANSWER, OTHER_ANSWER, _REASONING, _TOOL = "xq7", "yr8", "zs9", "wp6", "vt5"
"""Made-up texts, which begin and end differently, so that a comparison ends where a text does."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that may hold the reasoning of an answer."""
_MADE_UP_TOOL = {
    "type": "function",
    "function": {"name": _TOOL, "description": "us4", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class Frame:
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


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that ends an answer in a chat: what the chat template writes after it, else the end token.

    The two differ in some models, such as Gemma, whose turns end with <end_of_turn> and whose texts with <eos>. With
    GLM's template it is the token that begins the next turn. The end may be an ordinary token, but not several.
    """
    end: int = tokenizer.eos_token_id
    if getattr(tokenizer, "chat_template", None) is None:
        return end
    frame = frame_of(tokenizer)
    last = frame.last or frame.opening
    ids: list[int] = tokenizer(last, add_special_tokens=False, verbose=False)["input_ids"] if last else []
    if len(ids) == 1:
        return ids[0]
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((index for index in ids if index in added), end)


@dataclass(frozen=True)
class UserTurn:
    """What stands before and after the text of a user who begins a chat."""

    opening: str
    """All that the template writes before it: begin token, its own system prompt, and the head of the turn."""
    end: str
    """What follows it, such as ``<|im_end|>\\n<|im_start|>assistant\\n``, without spaces at its beginning."""


def user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn | None:
    """Return what the chat template writes around a user's text that is to be answered; None if it does not write it.

    Raises whatever the template raises.
    """
    text = render(tokenizer, [{"role": "user", "content": QUESTION}], {}, asks=True)
    opening, question, end = text.partition(QUESTION)
    # Most tokenizers merge a space at the end into the first token of the text.
    return UserTurn(opening.rstrip(" "), (end + frame_of(tokenizer).header).lstrip()) if question else None


def shared_length(*sequences: Sequence[Any]) -> int:
    """Return how far sequences are equal from their beginning."""
    any_sequences: Any = sequences
    return len(os.path.commonprefix(any_sequences))  # noqa: RUF071  # of any sequences, although it is among the paths


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], options: Mapping[str, Any], *, asks: bool = False
) -> str:
    """Return what the template writes of messages; `asks` begins the turn of the assistant after them.

    A template can raise anything.
    """
    readable = as_the_template_reads(messages, tokenizer)
    return str(tokenizer.apply_chat_template(readable, tokenize=False, **{**options, "add_generation_prompt": asks}))


def as_the_template_reads(messages: list[Message], tokenizer: PreTrainedTokenizerBase) -> list[Message]:
    """Return messages with their texts as lists of parts for the roles whose plain strings the template ignores.

    The templates of some models that also see images are like that (Idefics, SmolVLM, LLaVA); others read both.
    """
    in_parts = _roles_in_parts(tokenizer)
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message["role"] in in_parts
        else message
        for message in messages
    ]


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template)


# The template and the end token of a tokenizer can change, so its identity alone is no key.
@cached_by(lambda tokenizer: (tokenizer, _template_text(tokenizer)), most=64)
def _roles_in_parts(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    def writes(content: object, role: str, before: Sequence[Message], after: Sequence[Message] = ()) -> bool:
        chat = [*before, {"role": role, "content": content}, *after]
        with suppress(Exception):  # a template can raise anything
            return ANSWER in str(tokenizer.apply_chat_template(chat, tokenize=False))
        return False

    def in_parts(role: str, *others: Sequence[Message]) -> bool:
        return not writes(ANSWER, role, *others) and writes([{"type": "text", "text": ANSWER}], role, *others)

    parts: Any = [{"type": "text", "text": QUESTION}]
    roles = {"user"} if in_parts("user", []) else set()
    question = {"role": "user", "content": parts if roles else QUESTION}
    roles |= {"assistant"} if in_parts("assistant", [question]) else set()
    roles |= {"system"} if in_parts("system", [], [question]) else set()
    # Mistral's templates refuse a call whose id is not of nine letters and digits.
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "content": parts if "assistant" in roles else "", "tool_calls": [call]}
    roles |= {"tool"} if in_parts("tool", [question, calling]) else set()
    return frozenset(roles)


# The template and the end token of a tokenizer can change, so its identity alone is no key.
@cached_by(lambda tokenizer, options: (tokenizer, _template_text(tokenizer), json.dumps(options, default=str)), most=64)
def num_calls_written(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> float:
    """Return how many calls of tools in one turn the template writes for sure: none, one (gpt-oss), or infinitely many.

    Templates that read ids in their own form, such as functions.NAME:0 (Kimi K2), count as writing none.
    """
    question = {"role": "user", "content": QUESTION}
    for names, number in (((ANSWER, OTHER_ANSWER), math.inf), ((ANSWER,), 1)):
        calls = [
            {"type": "function", "id": f"call0000{place}", "function": {"name": name, "arguments": {}}}
            for place, name in enumerate(names)
        ]
        with suppress(Exception):  # a template can raise anything
            text = render(tokenizer, [question, {"role": "assistant", "content": "", "tool_calls": calls}], options)
            if all(name in text for name in names):
                return number
    return 0


@cached_by(lambda tokenizer, options: (tokenizer, _template_text(tokenizer), json.dumps(options, default=str)), most=64)
def writes_tools(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> bool:
    """Return whether the template writes the definition of a made-up tool; False if it refuses this one."""
    with suppress(Exception):  # a template can raise anything
        return _TOOL in render(
            tokenizer, [{"role": "user", "content": QUESTION}], {**options, "tools": [_MADE_UP_TOOL]}, asks=True
        )
    return False


@cached_by(
    lambda tokenizer, options=None: (
        *(tokenizer, _template_text(tokenizer), tokenizer.eos_token),
        json.dumps(options or {}, default=str),
    ),
    most=64,
)
def frame_of(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> Frame:
    """Return what the template writes around texts with these further arguments.

    It compares renderings of made-up chats; the frame of a template that refuses them is empty.
    """

    def render_chat(*contents: str, asks: bool = False, **fields: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
        messages[-1] |= fields
        return render(tokenizer, messages, options or {}, asks=asks)

    try:
        with_prompt, without_prompt = (render_chat(QUESTION, asks=asks) for asks in (True, False))
        answered, other = render_chat(QUESTION, ANSWER), render_chat(QUESTION, OTHER_ANSWER)
    except Exception:
        # A template may be for chats with tools alone (Hermes 2 Pro); otherwise rendering a real chat reports it.
        return (
            Frame()
            if "tools" in (options or {})
            else frame_of(tokenizer, {**(options or {}), "tools": [_MADE_UP_TOOL]})
        )
    header, before = "", answered[: shared_length(answered, other)]
    if with_prompt == without_prompt and before.startswith(without_prompt):
        # A space at its end would be a token of its own in a prompt, but most tokenizers merge it into the first token
        # of an answer.
        header = before[len(without_prompt) :].rstrip(" ")
        header = header if header.strip() else ""
    prompt = header or with_prompt[len(without_begun_mark(with_prompt[: shared_length(with_prompt, without_prompt)])) :]
    tail = answered.rpartition(ANSWER)[2]
    inner = separator = ""
    try:
        longer = render_chat(QUESTION, ANSWER, OTHER_ANSWER, ANSWER)
        next_prompt = render_chat(QUESTION, ANSWER, asks=True)
    except Exception:
        pass
    else:
        separator = longer.partition(ANSWER)[2].partition(OTHER_ANSWER)[0]
        following = next_prompt.rpartition(ANSWER)[2] + header
        inner = without_overlap(without_begun_mark(separator[: shared_length(separator, following)]), prompt)
        # A template that writes the end of an answer behind each answer but the one that a prompt follows.
        inner = inner if inner.strip() else without_begun_mark(separator[: shared_length(separator, tail)])
        # A template that always begins the assistant's turn never shows where the user's turn ends, so its mark is
        # cut off here.
        mark = re.search(r"(<[^<>]*>|\[[^\[\]]*\])$", inner)
        begins = with_prompt == without_prompt and not separator.startswith(tail.rstrip())
        if mark and begins and mark[0] in tail and mark[0] in longer.partition(QUESTION)[0]:
            inner = inner[: mark.start()]
        inner = inner.rstrip()
    last = inner
    if not inner or not tail.startswith(inner):
        # A token that stands apart, such as the <eos> of Phi-3, is not part of the end of a turn.
        added = tokenizer.added_tokens_decoder.values()
        tokens = "|".join(re.escape(token.content) for token in added if token.content)
        apart = re.search(rf"(?<=\S)\s+(?:{tokens})+\s*$", tail) if tokens else None
        last = (tail if apart is None else tail[: apart.start()]).rstrip()
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    opening = "" if last else max(filter(separator.startswith, special), key=len, default="")
    with_prompt += header
    plain = answered[len(with_prompt) :].partition(ANSWER)[0] if answered.startswith(with_prompt) else ""
    return Frame(
        header,
        prompt,
        tail,
        last,
        inner or opening,
        separator,
        opening,
        writes_answers=ANSWER in answered,
        plain=plain if plain.strip() else "",
        **_find_reasoning(with_prompt, partial(render_chat, QUESTION, ANSWER)),
    )


def _find_reasoning(prompt: str, render_answer: Callable[..., str]) -> dict[str, Any]:
    """Find how a template writes the reasoning of an answer; `render_answer` takes further keys of its message."""
    for key in REASONING_KEYS:
        try:
            text = render_answer(**{key: _REASONING})
        except Exception:
            continue
        if text.startswith(prompt) and _REASONING in text[len(prompt) :]:
            before, _, after = text[len(prompt) :].partition(_REASONING)
            return {
                "before_reasoning": before,
                "after_reasoning": after.partition(ANSWER)[0],
                "reasoning_key": key,
            }
    # A template may begin reasoning in the prompt, but leave it out of a conversation (DeepSeek-R1).
    mark = re.search(r"<(\w+)>\s*$", prompt)
    return {"after_reasoning": f"</{mark[1]}>"} if mark else {}


def without_begun_mark(text: str) -> str:
    """Leave out a mark that has only begun at the end of a text, such as ``<|`` of ``<|user|>``."""
    return re.sub(r"[<\[{][^<>\[\]{}\s]*$", "", text)


def without_overlap(text: str, following: str) -> str:
    """Leave out the end of a text with which `following` begins."""
    length = next(n for n in range(min(len(text), len(following)), -1, -1) if text.endswith(following[:n]))
    return text[: len(text) - length]
