"""An instruction set as tokens on disk: it is read and tokenized once, and every process maps it into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from llmdistill.data.collate import Encoded
from llmdistill.data.columns import TOKEN_IDS, Layout, MappedItems, SplitWriter, StoredSplits, in_pieces
from llmdistill.data.examples import Example, all_empty, no_answer, parse_row
from llmdistill.data.instruct import EncodedCounts, InstructData, Limits, encode, none_left
from llmdistill.data.prompts import PROMPT_WITH_INPUT, PROMPT_WITHOUT_INPUT, render_prompt
from llmdistill.data.sources import READERS, no_example, open_rows, read_examples
from llmdistill.data.store import store, store_folder, token_dtype, tokenizer_fingerprint
from llmdistill.data.text_files import content_sha256
from llmdistill.errors import UserError

_FORMAT = 4
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""

_ASKED = Example("", "", ("yes",), "", messages=(("user", "a"),))
"""Rendered by a chat template it shows what the template adds to messages, such as the date of the day."""


EXAMPLES = Layout(
    make=lambda ids, prompt_length, teacher: Encoded(
        ids[:prompt_length].tolist(), ids[prompt_length:].tolist(), teacher
    ),
    columns={"ids": TOKEN_IDS, "prompt_length": pa.int32(), "teacher": pa.string()},
)
"""How encoded examples are kept on disk."""

_SPLIT = "train"


@dataclass(frozen=True)
class StoredExamples:
    """An instruction set that is mapped into memory."""

    items: MappedItems[Encoded]
    counts: EncodedCounts


def store_examples(
    reference: str | Path, tokenizer: PreTrainedTokenizerBase, limits: Limits, *, cache_dir: str | Path | None = None
) -> Path:
    """Tokenize an instruction set into a folder; reuse that of the same rows, tokenizer and limits.

    The examples are those that `encode` makes of `read_examples`, in their order.

    Args:
        reference: as in `read_examples`; the rows are identified by their content, also those of the hub.
        tokenizer: the tokenizer of the model that is trained.
        limits: the largest numbers of tokens, and the prompt.
        cache_dir: the tokens are stored in its folder ``instructions``; see `store_folder`.

    Returns:
        The folder, for `open_examples`.

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
        writer = SplitWriter(folder, token_dtype(tokenizer))
        counts = EncodedCounts()

        def pieces() -> Iterator[list[Encoded]]:
            nonlocal counts
            for data in _encoded(reference, tokenizer, limits):
                counts = counts.plus(data.counts)
                yield data.items

        writer.add(_SPLIT, pieces(), EXAMPLES)
        return {"counts": counts, **writer.record()}

    folder = store_folder(cache_dir, "instructions", request)
    return store(folder, {"reference": str(reference), **request}, write)


def open_examples(folder: Path) -> StoredExamples:
    """Map an instruction set into memory. Raises UserError if it is damaged."""
    stored = StoredSplits(folder)
    return StoredExamples(stored.items(_SPLIT, EXAMPLES), EncodedCounts(*stored.meta["counts"]))


def _content(reference: str | Path) -> list[str]:
    """What identifies the rows of a set: how they are read and their content."""
    path = Path(reference)
    if path.is_file():
        kind = path.suffix.lower()
        return [kind if kind in READERS else ".jsonl", content_sha256(path)]
    hashed = hashlib.sha256()
    for row, _ in open_rows(reference, streaming=False):
        hashed.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return ["rows", hashed.hexdigest()]


def _chat(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """What a chat template is, and what it writes today."""
    template = json.dumps(tokenizer.chat_template) if tokenizer.chat_template else None
    if template is None:
        return [None, None]
    try:
        return [template, render_prompt(_ASKED, tokenizer)]
    except UserError:  # the template wants other messages
        return [template, None]


def _encoded(reference: str | Path, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> Iterator[InstructData]:
    """Tokenize the examples of a set piece by piece, so that it may be larger than memory."""
    read, kept, has_answers = 0, 0, False
    rows = open_rows(reference, streaming=False)
    for examples in in_pieces(parse_row(row, source) for row, source in rows):
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
