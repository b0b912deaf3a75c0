"""Tokenized instruction sets on disk: made once for the same rows, tokenizer and limits, and mapped into memory."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from llmdistill.data.chat_messages import Turn
from llmdistill.data.collate import Encoded
from llmdistill.data.examples import Example, all_empty, no_answer
from llmdistill.data.instruct import EncodedCounts, Limits, encode, none_left
from llmdistill.data.prompts import PROMPT_WITH_INPUT, PROMPT_WITHOUT_INPUT, render_prompt
from llmdistill.data.readers import READERS, content_sha256
from llmdistill.data.references import local_files
from llmdistill.data.rows import parse_rows
from llmdistill.data.sources import no_example, open_rows, read_examples
from llmdistill.data.store import (
    TOKEN_IDS,
    MappedItems,
    Schema,
    SplitWriter,
    StoredSplits,
    in_pieces,
    store,
    tokenizer_fingerprint,
)
from llmdistill.errors import UserError

_FORMAT = 10
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""

_SAMPLE_CHAT = Example("", "", ("yes",), "", messages=(Turn("user", "a"),))
"""A chat whose rendering shows what a template adds to messages, such as today's date."""

EXAMPLES = Schema(
    make=lambda ids, borders, teacher, asked_ids: Encoded.of(
        ids.tolist(), borders.tolist(), teacher, None if asked_ids is None else asked_ids.tolist()
    ),
    columns={"ids": TOKEN_IDS, "borders": pa.list_(pa.int32()), "teacher": pa.string(), "asked_ids": TOKEN_IDS},
)
"""How encoded examples are stored on disk."""


class StoredExamples(NamedTuple):
    items: MappedItems[Encoded]
    counts: EncodedCounts
    left_out: Mapping[str, int]
    """What was left out of the rows; see `parse_rows`."""


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
    files, rows = local_files(str(reference)), list[Any]()
    if files is None:
        hashed = hashlib.sha256()
        for row, _ in open_rows(reference):
            # The hub's files may change under the same name, so its rows are identified by their content.
            hashed.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        rows = ["rows", hashed.hexdigest()]
    for file in files or ():
        # The same bytes are other rows to another reader.
        reader = file.suffix.lower() if file.suffix.lower() in READERS else ".jsonl"
        rows.append([reader, content_sha256(file)])
    template = rendered = None
    if tokenizer.chat_template:
        template = json.dumps(tokenizer.chat_template)
        with suppress(UserError):  # the template wants other messages
            rendered = render_prompt(_SAMPLE_CHAT, tokenizer)
    request = {
        "format": _FORMAT,
        "rows": rows,
        # The tokenizer's own description does not say which tokens begin and end a text.
        "tokenizer": [tokenizer_fingerprint(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id],
        "prompts": [PROMPT_WITH_INPUT, PROMPT_WITHOUT_INPUT, [template, rendered]],
        **asdict(limits),
    }

    def write(folder: Path) -> dict[str, Any]:
        writer = SplitWriter(folder, tokenizer)
        counts, left_out = EncodedCounts(), Counter[str]()

        # Piece by piece, so that the set may be larger than memory.
        def pieces() -> Iterator[list[Encoded]]:
            nonlocal counts
            read, encoded, has_answers = 0, 0, False
            for examples in in_pieces(parse_rows(open_rows(reference), left_out), size=Example.num_characters):
                try:
                    data = encode(examples, tokenizer, limits, may_be_empty=True)
                except UserError:
                    # The message counts the long prompts of the whole set, and malformed rows come first in it.
                    encode(read_examples(reference), tokenizer, limits)
                    raise
                counts = counts.plus(data.counts)
                yield data.items
                read, encoded = read + len(examples), encoded + len(data.items)
                has_answers = has_answers or not all_empty(examples)
            # Only at the end is it known of the whole set.
            if read == 0:
                raise no_example(reference, left_out)
            if encoded == 0:
                raise none_left(read, limits)
            if not has_answers:
                raise no_answer(reference, read)

        writer.add("train", pieces(), EXAMPLES)
        return {"counts": counts, "left_out": left_out, "splits": writer.splits}

    return store(cache_dir, "instructions", request, write, reference=str(reference))


def open_examples(folder: Path) -> StoredExamples:
    """Map an instruction set into memory. Raises UserError if it is damaged."""
    stored = StoredSplits(folder)
    counts = EncodedCounts(*stored.meta["counts"])
    return StoredExamples(stored.items("train", EXAMPLES), counts, stored.meta["left_out"])
