"""Tokenizes instructions: renders prompts, limits lengths and appends the end token; a whole set is kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from llmdistill.config import DataConfig, ResponseConfig
from llmdistill.data.collate import Encoded
from llmdistill.data.examples import Example, Turn, all_empty, no_answer, parse_row
from llmdistill.data.prompts import (
    MINILLM,
    PROMPT_WITH_INPUT,
    PROMPT_WITHOUT_INPUT,
    as_chat,
    end_of_turn,
    is_chat,
    render_chats,
    render_prompt,
    resolve_prompt,
)
from llmdistill.data.sources import READERS, content_sha256, no_example, open_rows, read_examples
from llmdistill.data.store import (
    TOKEN_IDS,
    Layout,
    MappedItems,
    SplitWriter,
    StoredSplits,
    in_pieces,
    store,
    tokenizer_fingerprint,
)
from llmdistill.errors import UserError

_FORMAT = 4
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""

_ASKED = Example("", "", ("yes",), "", messages=(Turn("user", "a"),))
"""Rendered by a chat template it shows what the template adds to messages, such as the date of the day."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How examples become tokens: the largest numbers of them, what happens to longer prompts, and the prompt."""

    max_prompt_length: int = 256
    max_length: int = 512
    """Of prompt and response together; a longer response is cut and counted."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    prompt: str = MINILLM
    """The resolved prompt of instructions; see `resolve_prompt`."""

    def __post_init__(self) -> None:
        if not 0 < self.max_prompt_length < self.max_length:
            raise UserError(
                f"data.max_prompt_length={self.max_prompt_length} must be at least 1 and below data.max_length="
                f"{self.max_length}; lower the first or raise the second"
            )

    @classmethod
    def of(cls, settings: DataConfig | ResponseConfig, tokenizers: Sequence[PreTrainedTokenizerBase]) -> Limits:
        """The limits in these settings, with the prompt for the models of the tokenizers; see `resolve_prompt`."""
        values = {each.name: getattr(settings, each.name) for each in fields(cls)}
        return cls(**{**values, "prompt": resolve_prompt(settings.prompt, tokenizers)})


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts within the limit, in order, and the numbers of prompts that were dropped and truncated."""

    ids: list[list[int]]
    kept: list[int]
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
    kept: list[int]
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
    all_ids, limit = prompt_ids(examples, tokenizer, limits.prompt), limits.max_prompt_length
    long = [index for index, ids in enumerate(all_ids) if len(ids) > limit]
    if long and limits.long_prompts == "error":
        first = examples[long[0]].source or f"prompt {long[0] + 1}"
        setting, length = f"data.max_prompt_length={limit}", len(all_ids[long[0]])
        said = f"{len(long)} of {len(all_ids)} prompts are longer than {setting} tokens, first {first} with {length}"
        if len(all_ids) == 1:  # a stream passes a single prompt at a time
            said = f"{first}: the prompt has {length} tokens and is longer than {setting}"
        raise UserError(f"{said}; set data.long_prompts=drop or =truncate, or a larger data.max_prompt_length")
    dropped = set(long) if limits.long_prompts == "drop" else set()
    if dropped and len(dropped) == len(all_ids) and not may_be_empty:
        raise none_left(len(dropped), limits)
    kept = [index for index in range(len(all_ids)) if index not in dropped]
    ids = [_last_tokens(all_ids[index], limit, tokenizer) for index in kept]
    return EncodedPrompts(ids, kept, dropped=len(dropped), truncated=len(long) - len(dropped))


def prompt_ids(examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[list[int]]:
    plain = [render_prompt(example, prompt=prompt) for example in examples if not is_chat(example, prompt)]
    chatting = [as_chat(example) for example in examples if is_chat(example, prompt)]
    chats = render_chats(chatting, tokenizer) if chatting else []
    plain_ids = iter(tokenizer(plain, verbose=False)["input_ids"] if plain else [])
    # A chat template writes the start token itself, and an end token in it belongs to the template.
    chat_ids = iter(tokenizer(chats, add_special_tokens=False, verbose=False)["input_ids"] if chats else [])
    return [next(chat_ids) if is_chat(each, prompt) else _as_prompt(next(plain_ids), tokenizer) for each in examples]


def _as_prompt(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # A prompt without template may already contain the start token that the tokenizer adds.
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        ids = ids[1:]
    # Some tokenizers add the end token to every text, but the model has to continue a prompt.
    ends = ids and ids[-1] == tokenizer.eos_token_id
    return ids[:-1] if ends else ids


def none_left(dropped: int, limits: Limits) -> UserError:
    return UserError(
        f"all {dropped} prompts are longer than data.max_prompt_length={limits.max_prompt_length} tokens and "
        "data.long_prompts=drop leaves none; set a larger data.max_prompt_length or data.long_prompts=truncate"
    )


def _last_tokens(ids: list[int], length: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if len(ids) <= length:
        return ids
    # A model that was trained with a start token works badly without it.
    start = ids[:1] if ids[0] == tokenizer.bos_token_id else []
    return start + ids[len(ids) - length + len(start) :]


def encode(
    examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, limits: Limits, *, may_be_empty: bool = False
) -> InstructData:
    """Tokenize the prompt and the first reference of each example; the end token is always appended (and learned).

    An answer in a chat ends with the token that ends a turn, any other with the tokenizer's end token. Prompt and
    response are tokenized separately, as MiniLLM does in effect, so no token contains parts of both.

    Raises:
        UserError: as in `encode_prompts`, or the tokenizer has no end token.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
    prompts = encode_prompts(examples, tokenizer, limits, may_be_empty=may_be_empty)
    answers = [examples[index].outputs[0] for index in prompts.kept]
    responses = tokenizer(answers, add_special_tokens=False, verbose=False)["input_ids"] if answers else []
    items, truncated_responses, ends_turn = [], 0, end_of_turn(tokenizer)
    for index, prompt_ids, response_ids in zip(prompts.kept, prompts.ids, responses, strict=True):
        end = ends_turn if is_chat(examples[index], limits.prompt) else tokenizer.eos_token_id
        response_ids = [*response_ids, end]
        room = limits.max_length - len(prompt_ids)
        truncated_responses += len(response_ids) > room
        items.append(Encoded(prompt_ids, response_ids[:room], examples[index].teacher))
    counts = EncodedCounts(len(items), prompts.dropped, prompts.truncated, truncated_responses)
    return InstructData(items, prompts.kept, counts)


EXAMPLES = Layout(
    make=lambda ids, prompt_length, teacher: Encoded(
        ids[:prompt_length].tolist(), ids[prompt_length:].tolist(), teacher
    ),
    columns={"ids": TOKEN_IDS, "prompt_length": pa.int32(), "teacher": pa.string()},
)
"""How encoded examples are kept on disk."""


class StoredExamples(NamedTuple):
    items: MappedItems[Encoded]
    counts: EncodedCounts


def store_examples(
    reference: str | Path, tokenizer: PreTrainedTokenizerBase, limits: Limits, *, cache_dir: str | Path | None = None
) -> Path:
    """Tokenize an instruction set into a folder; reuse that of the same rows, tokenizer and limits.

    The examples are those that `encode` makes of `read_examples`, in their order. The rows are identified by their
    content, also those of the hub.

    Returns:
        The folder, for `open_examples`: one in the folder ``instructions`` of `cache_dir`, see `store`.

    Raises:
        UserError: as in `read_examples` and `encode`, or the cache has no room.
    """
    request = {
        "format": _FORMAT,
        "rows": _content(reference),
        "tokenizer": [tokenizer_fingerprint(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id],
        "prompts": [PROMPT_WITH_INPUT, PROMPT_WITHOUT_INPUT, _chat(tokenizer)],
        **asdict(limits),
    }

    def write(folder: Path) -> dict[str, Any]:
        writer = SplitWriter(folder, tokenizer)
        counts = EncodedCounts()

        def pieces() -> Iterator[list[Encoded]]:
            nonlocal counts
            for data in _encoded(reference, tokenizer, limits):
                counts = counts.plus(data.counts)
                yield data.items

        writer.add("train", pieces(), EXAMPLES)
        return {"counts": counts, "splits": writer.splits}

    return store(cache_dir, "instructions", request, write, reference=str(reference))


def open_examples(folder: Path) -> StoredExamples:
    """Map an instruction set into memory. Raises UserError if it is damaged."""
    stored = StoredSplits(folder)
    return StoredExamples(stored.items("train", EXAMPLES), EncodedCounts(*stored.meta["counts"]))


def _content(reference: str | Path) -> list[str]:
    """What identifies the rows of a set: how they are read and their content."""
    path = Path(reference)
    if path.is_file():
        kind = path.suffix.lower()
        return [kind if kind in READERS else ".jsonl", content_sha256(path)]
    hashed = hashlib.sha256()
    for row, _ in open_rows(reference):
        hashed.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return ["rows", hashed.hexdigest()]


def _chat(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """What a chat template is, and what it writes today."""
    if not tokenizer.chat_template:
        return [None, None]
    template = json.dumps(tokenizer.chat_template)
    try:
        return [template, render_prompt(_ASKED, tokenizer)]
    except UserError:  # the template wants other messages
        return [template, None]


def _encoded(reference: str | Path, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> Iterator[InstructData]:
    """Tokenize the examples of a set piece by piece, so that it may be larger than memory."""
    read, kept, has_answers = 0, 0, False
    for examples in in_pieces(parse_row(row, source) for row, source in open_rows(reference)):
        try:
            data = encode(examples, tokenizer, limits, may_be_empty=True)
        except UserError:
            # The message counts the long prompts of the whole set, and malformed rows come first in it.
            encode(read_examples(reference), tokenizer, limits)
            raise
        yield data
        read, kept = read + len(examples), kept + len(data.items)
        has_answers = has_answers or not all_empty(examples)
    if read == 0:
        raise no_example(reference)
    if kept == 0:
        raise none_left(read, limits)
    if not has_answers:
        raise no_answer(reference, read)
