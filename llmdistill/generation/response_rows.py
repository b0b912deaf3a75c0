"""Answers of a model as text and as rows of training data, which `data.rows` reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from llmdistill.data.chats import Reply, read_reply, render_chats
from llmdistill.data.collate import Encoded
from llmdistill.data.examples import Example
from llmdistill.data.instruct import NO_LIMIT, Limits, encode
from llmdistill.data.prompts import CHAT, as_chat
from llmdistill.errors import UserError

# A row is compared with the tokens as a whole, so no limit may cut it.
_WHOLE = Limits(max_prompt_length=NO_LIMIT - 1, max_length=NO_LIMIT, prompt=CHAT, turns="last")


def final_answers(rows: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> list[str]:
    """Decode generated tokens to the answers, without their reasoning, special tokens and end token, stripped."""
    # The end token is cut here because it is not a special token in every tokenizer.
    ended = [row[:-1] if row and row[-1] in ends else row for row in rows]
    texts = [text.strip() for text in tokenizer.batch_decode(ended, skip_special_tokens=True)]
    for place, ids in enumerate(ended if tokenizer.chat_template else ()):
        reply = read_reply(_decode(ids, tokenizer), tokenizer)
        if reply.is_read:
            special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
            texts[place] = re.sub("|".join(map(re.escape, special)), "", reply.content).strip()
    return texts


def without_learned_turns(example: Example) -> Example:
    """Return an example whose earlier answers are not learned, because the teacher did not write them."""
    turns = (turn if turn.role != "assistant" else replace(turn, is_learned=False) for turn in example.messages)
    return replace(example, messages=tuple(turns))


def prompt_row(example: Example) -> dict[str, Any]:
    """Return an example without its answers, in the format in which it was read."""
    if example.messages:
        unlearned = [{} if turn.is_learned else {"weight": 0} for turn in example.messages]
        turns = [{**turn.as_message(), **more} for turn, more in zip(example.messages, unlearned, strict=True)]
        options = {"tools": list(example.tools), "chat_template_kwargs": dict(example.template_options)}
        return {"messages": turns, **{key: value for key, value in options.items() if value}}
    if example.raw_prompt is not None:
        return {"prompt": example.raw_prompt}
    return {"instruction": example.instruction, "input": example.input}


def answered_row(example: Example, answer: str, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return an example with this answer, in the format in which the example was read.

    `fields` are those of the answer's message beside its content.
    """
    row = prompt_row(example)
    if example.messages:
        return {**row, "messages": [*row["messages"], {"role": "assistant", "content": answer, **fields}]}
    return {**row, "completion" if "prompt" in row else "output": answer, **fields}


def learnable_row(
    example: Example,
    ids: list[int],
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    ends: Collection[int],
) -> dict[str, Any]:
    """Return a chat with its answer as a row from which exactly the generated tokens are learned.

    The row is the first of these that gives those tokens: the final answer `text`, with its reasoning in the field that
    the template reads; the same with the spaces that the model wrote around it; and everything as one text. If none
    does, and the text contains marks of the template, such as a call of a tool, the row is the rendered prompt and its
    completion. Otherwise it is the first one, as for a template that always writes a block of reasoning.
    """
    chat = as_chat(example)
    raw = _decode(ids[:-1] if ids[-1:] and ids[-1] in ends else ids, tokenizer)
    reply = read_reply(raw, tokenizer, chat)
    candidates = [Reply(text, reply.fields), reply, Reply(raw)]
    as_chats = [
        (replace(chat, outputs=(candidate.content,), answer_fields=candidate.fields), candidate)
        for candidate in candidates
    ]
    # Compare tokens first and texts second: with some tokenizers the end of the prompt and the beginning of the answer
    # merge into one token of the chat.
    for as_text in (False, True):
        for filled, candidate in as_chats:
            if _is_written(filled, ids, tokenizer, as_text=as_text):
                return answered_row(example, candidate.content, candidate.fields)
    special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    if reply.is_read or any(mark in raw and mark in str(tokenizer.chat_template) for mark in special):
        [prompt] = render_chats([chat], tokenizer)
        # Tokenizing a completion appends the end token again.
        completion = _decode(ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids, tokenizer)
        as_it_is = Example("", "", (completion,), raw_prompt=prompt)
        if _is_written(as_it_is, ids, tokenizer):
            return answered_row(as_it_is, completion)
    return answered_row(example, text, reply.fields)


def _is_written(example: Example, ids: list[int], tokenizer: PreTrainedTokenizerBase, *, as_text: bool = False) -> bool:
    """Return whether an example has the tokens, or their text, of its prompt and then of these; an end may follow."""
    item = _encode(example, tokenizer)
    if item is None:
        return False
    wanted = [*item.last_prompt, *ids]
    if as_text:
        return _decode(item.ids, tokenizer).startswith(_decode(wanted, tokenizer))
    return wanted == item.ids[: len(wanted)]


def _encode(example: Example, tokenizer: PreTrainedTokenizerBase) -> Encoded | None:
    try:
        [item] = encode([example], tokenizer, _WHOLE).items
    except UserError:  # the template refuses an answer of this form
        return None
    return item


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
