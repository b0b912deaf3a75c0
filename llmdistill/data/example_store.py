"""An instruction set as tokens on disk: it is read and tokenized once, and every process maps it into memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.data.collate import Encoded
from llmdistill.data.columns import MappedItems, in_pieces
from llmdistill.data.examples import Example, all_empty, no_answer, parse_row
from llmdistill.data.instruct import EncodedCounts, Limits, encode, none_left
from llmdistill.data.prompts import PROMPT_WITH_INPUT, PROMPT_WITHOUT_INPUT, render_prompt
from llmdistill.data.sources import READERS, no_example, open_rows, read_examples, unreadable
from llmdistill.data.store import ArrayWriter, mapped, store, store_folder, token_dtype, tokenizer_fingerprint
from llmdistill.errors import UserError
from llmdistill.fingerprints import file_sha256

_FORMAT = 2
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""

_AT_ONCE = 1000
"""Number of examples that are parsed, tokenized and then written together."""

_ASKED = Example("", "", ("yes",), "", messages=(("user", "a"),))
"""Rendered by a chat template it shows what the template adds to messages, such as the date of the day."""


class MappedExamples(MappedItems[Encoded]):
    """Tokenized examples in two arrays; the tokens of an example are copied only when it is asked for."""

    def __init__(self, tokens: np.ndarray, bounds: np.ndarray) -> None:
        """Take the tokens of all prompts and responses, (tokens,), and where each begins, (2 * examples + 1,).

        Example i has the tokens from bounds[2 * i] to bounds[2 * i + 2]; its response begins at bounds[2 * i + 1].
        """
        # As plain arrays, slices of which cost a tenth of those of a memmap; both see the same mapped pages.
        self._tokens, self._bounds = np.asarray(tokens), np.asarray(bounds)

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def _item(self, place: int) -> Encoded:
        first, response, end = self._bounds[2 * place : 2 * place + 3].tolist()
        return Encoded(self._tokens[first:response].tolist(), self._tokens[response:end].tolist())

    def length(self, index: int) -> int:
        """See MappedItems."""
        return int(self._bounds[2 * index + 2]) - int(self._bounds[2 * index])


def to_arrays(items: Sequence[Encoded], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the two arrays of MappedExamples for some examples."""
    parts = [part for item in items for part in (item.prompt_ids, item.response_ids)]
    bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts], dtype=np.int64)])
    return np.fromiter((token for part in parts for token in part), dtype, count=int(bounds[-1])), bounds


@dataclass(frozen=True)
class StoredExamples:
    """An instruction set that is mapped into memory."""

    items: MappedExamples
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
        dtypes = {"tokens": token_dtype(tokenizer), "bounds": np.dtype(np.int64)}
        with ArrayWriter(folder, dtypes) as writer:
            counts = _write(writer, dtypes["tokens"], reference, tokenizer, limits)
        return {"counts": counts, "arrays": writer.record()}

    folder = store_folder(cache_dir, "instructions", request)
    return store(folder, {"reference": str(reference), **request}, write)


def open_examples(folder: Path) -> StoredExamples:
    """Map an instruction set into memory. Raises UserError if it is damaged."""
    meta, arrays = mapped(folder)
    return StoredExamples(MappedExamples(arrays["tokens"], arrays["bounds"]), EncodedCounts(*meta["counts"]))


def _content(reference: str | Path) -> list[str]:
    """What identifies the rows of a set: how they are read and their content."""
    path = Path(reference)
    if path.is_file():
        kind = path.suffix.lower()
        try:
            return [kind if kind in READERS else ".jsonl", file_sha256(path)]
        except OSError as error:
            raise unreadable(path, "UTF-8 text", error) from error
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


def _write(
    writer: ArrayWriter,
    dtype: np.dtype[Any],
    reference: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
) -> EncodedCounts:
    """Write the examples of a set piece by piece, so that it may be larger than memory; return how many they are."""
    counts, read, start, has_answers = EncodedCounts(), 0, 0, False
    rows = open_rows(reference, streaming=False)
    for examples in in_pieces((parse_row(row, source) for row, source in rows), _AT_ONCE):
        try:
            data = encode(examples, tokenizer, limits, may_be_empty=True)
        except UserError:
            # The message counts the long prompts of the whole set, and malformed rows come first in it.
            encode(read_examples(reference), tokenizer, limits)
            raise
        tokens, bounds = to_arrays(data.items, dtype)
        writer.add("tokens", tokens)
        writer.add("bounds", start + bounds[:-1])
        start, read, counts = start + len(tokens), read + len(examples), counts.plus(data.counts())
        has_answers = has_answers or not all_empty(examples)
    if read == 0:
        raise no_example(reference)
    if counts.examples == 0:
        raise none_left(read, limits)
    if not has_answers:
        raise no_answer(reference, read)
    writer.add("bounds", start)
    return counts
