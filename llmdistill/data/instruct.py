"""Tokenizes instructions: renders prompts, limits lengths and appends the end token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizerBase

from llmdistill.config import DataConfig, ResponseConfig
from llmdistill.data.chats import Turns, check_end_is_marked, render_answered, source_prefix
from llmdistill.data.collate import Encoded, sample_id
from llmdistill.data.examples import Example
from llmdistill.data.prompts import (
    MINILLM,
    as_chat,
    check_chat_keys,
    is_chat,
    render_chats,
    render_prompt,
    resolve_prompt,
)
from llmdistill.errors import UserError
from llmdistill.models.chat_templates import end_of_turn, shared_length
from llmdistill.models.unembedded import check_token_ids

NO_LIMIT = 2**31
"""A limit of tokens that no text has."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How examples become tokens: the largest numbers of them, what happens to longer prompts, and the prompt."""

    max_prompt_length: int = 256
    max_length: int = 512
    """Of prompt and response together; a longer response is cut and counted."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    prompt: str = MINILLM
    """The resolved prompt of instructions; see `resolve_prompt`."""
    turns: Turns = "all"
    """Which answers of a conversation are learned."""

    def __post_init__(self) -> None:
        if not 0 < self.max_prompt_length < self.max_length:
            raise UserError(
                f"data.max_prompt_length={self.max_prompt_length} must be at least 1 and below data.max_length="
                f"{self.max_length}; lower the first or raise the second"
            )

    @classmethod
    def of(cls, settings: DataConfig | ResponseConfig, tokenizers: Sequence[PreTrainedTokenizerBase]) -> Limits:
        """Return the limits in these settings, with the prompt for the tokenizers' models; see `resolve_prompt`."""
        values = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**{**values, "prompt": resolve_prompt(settings.prompt, tokenizers)})


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts within the limit, in order, and the numbers of prompts that were dropped and truncated."""

    ids: list[list[int]]
    indices: list[int]
    """For each entry of ids, its index in the given prompts."""
    dropped: int
    truncated: int


class EncodedCounts(NamedTuple):
    """How many examples there are, and how many were dropped or cut."""

    examples: int = 0
    dropped: int = 0
    """Examples whose prompt is too long."""
    truncated_prompts: int = 0
    truncated_responses: int = 0
    """Responses that are cut at the maximum length; these have no end token."""

    def plus(self, other: EncodedCounts) -> EncodedCounts:
        return EncodedCounts(*(mine + its for mine, its in zip(self, other, strict=True)))

    def report(self) -> str:
        return (
            f"{self.examples} examples: {self.dropped} dropped for a long prompt, "
            f"{self.truncated_prompts} prompts and {self.truncated_responses} responses truncated."
        )


class InstructData(NamedTuple):
    """A training set as tokens."""

    items: list[Encoded]
    indices: list[int]
    """For each item, the index of its example among the given ones."""
    counts: EncodedCounts


def encode_prompts(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limits: Limits, *, may_be_empty: bool = False
) -> EncodedPrompts:
    """Tokenize the prompt of each example, rendered by `render_prompt`, within the limits.

    Truncation keeps the end (``### Response:``). A prompt from messages gets no second start token.

    Raises:
        UserError: as in `render_prompt`; a prompt is too long and limits.long_prompts is "error"; or no prompt is left,
            unless may_be_empty.
    """
    check_chat_keys(examples, limits.prompt)
    # One call for all chats and one for all others: a tokenizer is many times faster with a list of texts.
    plain = [
        render_prompt(example, prompt=limits.prompt) for example in examples if not is_chat(example, limits.prompt)
    ]
    plain_ids = iter(_tokenize_prompts(plain, tokenizer))
    chats = render_chats([as_chat(example) for example in examples if is_chat(example, limits.prompt)], tokenizer)
    chat_ids = iter(_tokenize(chats, tokenizer))
    all_ids = [next(chat_ids if is_chat(example, limits.prompt) else plain_ids) for example in examples]
    check_token_ids(tokenizer, all_ids, lambda number, _: _locate(examples, number))
    within_limits, dropped, truncated = _apply_limits([len(ids) for ids in all_ids], examples, limits, may_be_empty)
    ids = [_keep_end(all_ids[index], limits.max_prompt_length, tokenizer) for index in within_limits]
    return EncodedPrompts(ids, within_limits, dropped, truncated)


def _locate(examples: Sequence[Example], number: int) -> str:
    return examples[number].source or f"prompt {number + 1}"


def _apply_limits(
    lengths: Sequence[int], examples: Sequence[Example], limits: Limits, may_be_empty: bool
) -> tuple[list[int], int, int]:
    """Return the indices of the prompts that stay, and how many are dropped and truncated.

    Raises UserError as `encode_prompts` does.
    """
    limit = limits.max_prompt_length
    long = [index for index, length in enumerate(lengths) if length > limit]
    if long and limits.long_prompts == "error":
        first = _locate(examples, long[0])
        setting, length = f"data.max_prompt_length={limit}", lengths[long[0]]
        problem = f"{len(long)} of {len(lengths)} prompts are longer than {setting} tokens, first {first} with {length}"
        if len(lengths) == 1:  # a stream passes a single prompt at a time
            problem = f"{first}: the prompt has {length} tokens and is longer than {setting}"
        raise UserError(f"{problem}; set data.long_prompts=drop or =truncate, or a larger data.max_prompt_length")
    dropped = set(long) if limits.long_prompts == "drop" else set()
    if dropped and len(dropped) == len(lengths) and not may_be_empty:
        raise none_left(len(dropped), limits)
    within_limits = [index for index in range(len(lengths)) if index not in dropped]
    return within_limits, len(dropped), len(long) - len(dropped)


def _tokenize_prompts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    prompts = []
    for ids in tokenizer(texts, verbose=False)["input_ids"] if texts else []:
        # A prompt without template may already contain the start token that the tokenizer adds.
        if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
            ids = ids[1:]
        # Some tokenizers add the end token to every text, but the model has to continue a prompt.
        ends = ids and ids[-1] == tokenizer.eos_token_id
        prompts.append(ids[:-1] if ends else ids)
    return prompts


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize texts without the tokenizer's own start and end tokens, which a chat template writes itself."""
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def none_left(dropped: int, limits: Limits) -> UserError:
    return UserError(
        f"all {dropped} prompts are longer than data.max_prompt_length={limits.max_prompt_length} tokens and "
        "data.long_prompts=drop leaves none; set a larger data.max_prompt_length or data.long_prompts=truncate"
    )


def _keep_end(ids: list[int], length: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if len(ids) <= length:
        return ids
    # The start token stays in front of the cut prompt: a model that was trained with one works badly without it.
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return start + ids[len(ids) - length + len(start) :]


def encode(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limits: Limits, *, may_be_empty: bool = False
) -> InstructData:
    """Tokenize the prompt and the first reference of each example; the end token is always learned.

    A chat has the tokens of its whole rendering, and what the template writes for its answers is learned. Of other
    examples prompt and response are tokenized separately, as MiniLLM does in effect, so no token contains parts of
    both, and the tokenizer's end token is appended.

    Raises:
        UserError: as in `encode_prompts` and `render_answered`, or the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    check_chat_keys(examples, limits.prompt)
    chats = iter(
        _encode_chats([as_chat(example) for example in examples if is_chat(example, limits.prompt)], tokenizer, limits)
    )
    plain = [example for example in examples if not is_chat(example, limits.prompt)]
    prompts = iter(_tokenize_prompts([render_prompt(example, prompt=limits.prompt) for example in plain], tokenizer))
    answers = iter(_tokenize([example.outputs[0] for example in plain], tokenizer))
    encoded = [
        next(chats)
        if is_chat(example, limits.prompt)
        else Encoded(next(prompts), [*next(answers), tokenizer.eos_token_id], example.teacher)
        for example in examples
    ]
    check_token_ids(tokenizer, (example.ids for example in encoded), lambda number, _: _locate(examples, number))
    within_limits, dropped, truncated = _apply_limits(
        [len(example.prompt_ids) for example in encoded], examples, limits, may_be_empty
    )
    items, shortened = list[Encoded](), 0
    for item in (encoded[index] for index in within_limits):
        if len(item) <= limits.max_length and len(item.prompt_ids) <= limits.max_prompt_length:
            items.append(item)
            continue
        prompt_ids = _keep_end(item.prompt_ids, limits.max_prompt_length, tokenizer)
        room = limits.max_length - len(prompt_ids)
        # A gap at the end of what is left would precede no answer.
        gaps = tuple((begin, end) for begin, end in item.gaps if end < room)
        # An answer of which nothing is left leaves no gap before it.
        end = min([room, len(item.response_ids), *(begin for begin, end in item.gaps if begin < room <= end)])
        rest_ids = item.rest_ids[: room - end] if end == len(item.response_ids) else []
        response_ids = item.response_ids[:end]
        items.append(replace(item, prompt_ids=prompt_ids, response_ids=response_ids, gaps=gaps, rest_ids=rest_ids))
        shortened += end < len(item.response_ids)
    return InstructData(items, within_limits, EncodedCounts(len(items), dropped, truncated, shortened))


def _encode_chats(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limits: Limits) -> list[Encoded]:
    chats = [render_answered(example, tokenizer, limits.turns) for example in examples]
    if not chats:
        return []
    batch = tokenizer([chat.text for chat in chats], add_special_tokens=False, verbose=False)
    # The prompts are tokenized apart: with GPT-2's tokenizer, for one, they are no prefix of the tokens of the chat.
    last_prompts = _tokenize([chat.prompts[-1] for chat in chats], tokenizer)
    items = []
    for index, (example, chat, prompt_ids) in enumerate(zip(examples, chats, last_prompts, strict=True)):
        places = _Places(tokenizer, batch, index, chat.text)
        parts = [(places.first(begin), places.after(end)) for begin, end in chat.learned]
        if chat.is_marked:
            marked: Any = tokenizer.apply_chat_template(
                chat.messages, return_dict=True, return_assistant_tokens_mask=True, **chat.options
            )
            within = {token for begin, end in parts for token in range(begin, end)}
            # The marks cover all answers, also those that are not to be learned.
            is_learned = [bool(mark) and token in within for token, mark in enumerate(marked["assistant_masks"])]
            learned = np.flatnonzero(np.diff([False, *is_learned, False])).tolist()  # begin, end, begin, end, ...
            if learned:
                check_end_is_marked(tokenizer, places.ids[learned[-2] : learned[-1]])
        else:
            learned = []
            for number, (begin, end) in enumerate(parts, start=1):
                # An empty last answer stays if the template writes no end, because the end token is appended to it.
                if begin < end or (number == len(parts) and not chat.has_end):
                    learned += [begin, end]
        if not learned and (example.outputs[0].strip() or not chat.learned):
            raise UserError(
                f"{source_prefix(example)}the tokenizer's chat template does not write the assistant's answer; give a "
                "template that does in tokenizer_config.json, or rows of prompt and completion"
            )
        ids = places.ids if chat.has_end else [*places.ids, end_of_turn(tokenizer)]
        learned = learned if chat.has_end else [*learned[:-1], len(ids)]
        learned = learned or [len(ids), len(ids)]  # nothing is learned of an empty answer without an end
        # A student that writes its answers itself answers the last prompt that is within the limit.
        for prompt in chat.prompts[-2::-1]:
            if len(prompt_ids) <= limits.max_prompt_length:
                break
            [prompt_ids] = _tokenize([prompt], tokenizer)
        prompt_ids = _keep_end(prompt_ids, limits.max_prompt_length, tokenizer)
        asked_ids = None if prompt_ids == ids[: learned[0]] else prompt_ids
        items.append(Encoded.of(ids, learned, example.teacher, asked_ids))
    return items


class _Places:
    """Where the characters of a text are among its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, batch: BatchEncoding, index: int, text: str) -> None:
        self._tokenizer, self._batch, self._index, self._text = tokenizer, batch, index, text
        self.ids: list[int] = batch["input_ids"][index]

    def first(self, character: int) -> int:
        """Return the first token with any of the characters from this one on."""
        # Only fast tokenizers know the characters of their tokens. For others the tokens of the beginning of the text
        # are compared with those of the whole text.
        if not self._tokenizer.is_fast:
            return shared_length(self.ids, *_tokenize([self._text[:character]], self._tokenizer))
        tokens = (self._batch.char_to_token(self._index, place) for place in range(character, len(self._text)))
        return next((token for token in tokens if token is not None), len(self.ids))

    def after(self, character: int) -> int:
        """Return the first token without any of the characters before this one."""
        token = self.first(character)
        if token == len(self.ids) or not self._tokenizer.is_fast:
            return token
        span = self._batch.token_to_chars(self._index, token)
        # A token across the border counts to what is before it.
        return token + (span is not None and span.start < character)


def parts_before(item: Encoded) -> dict[int, list[int]]:
    """Return the tokens before each answer of an example, by a `sample_id` of what is before it.

    Before the first answer these are the prompt; before each other answer, the tokens since the previous answer. Their
    id also covers all tokens up to the end of the previous answer.
    """
    ids, borders = item.ids, [0, *item.borders]
    before = {}
    for end_before, begin in zip(borders[::2], borders[1::2], strict=False):
        parts = (ids[:begin],) if end_before == 0 else (ids[:end_before], ids[end_before:begin])
        before[sample_id(*parts)] = ids[end_before:begin]
    return before
