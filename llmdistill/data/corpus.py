"""A tokenized text: its segments (lines) are read and tokenized once, stored on disk and mapped into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.data.memory import rows_in_memory
from llmdistill.data.random_streams import DOCUMENTS
from llmdistill.data.readers import READERS, by_lower_case, content_sha256, text_lines, with_names
from llmdistill.data.references import text_files
from llmdistill.data.sources import Data, open_rows
from llmdistill.data.store import pieces, read_meta, store, token_dtype, tokenizer_fingerprint
from llmdistill.errors import UserError
from llmdistill.models.unembedded import check_token_ids
from llmdistill.progress import progress

_FORMAT = 2
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""

_AT_ONCE = 512
"""Number of segments that are tokenized and then written together."""

Segments = Iterator[tuple[tuple[int, int], str]]
"""The lines of a text, each with its document: number of the file and number in the file."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenized text: documents of segments (lines), as token ids on disk that are mapped into memory."""

    tokens: np.ndarray
    """(tokens,) uint16, or uint32 for vocabularies that need it."""
    segments: np.ndarray
    """(segments + 1,) int64: the first token of each segment, and the end. No segment is empty."""
    documents: np.ndarray
    """(documents + 1,) int64: the first segment of each document, and the end. No document is empty."""

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def first_token(self, document: int) -> int:
        """Return the index of a document's first token; for the document after the last one, the number of tokens."""
        return int(self.segments[self.documents[document]])

    def report(self) -> str:
        return f"{self.num_documents:,} documents, {len(self.segments) - 1:,} segments, {len(self.tokens):,} tokens"


def store_corpus(
    reference: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str = "text",
    cache_dir: str | Path | None = None,
    fraction: float = 1.0,
    seed: int = 0,
) -> Path:
    """Tokenize a text, without special tokens, into a folder; reuse that of the same text, tokenizer and field.

    In a plain text file a line is a segment, and an empty line ends a document. In rows each row is a document, and its
    lines are the segments. A tokenizer with a mask token belongs to an encoder, and gets each line without the blanks
    at its ends. Any other tokenizer belongs to a decoder, which has to learn line ends and indentation: a segment keeps
    its line end, and in rows the empty lines after it too.

    Args:
        reference: a file (JSONL, JSON, Parquet and CSV hold rows, any other ending is plain text); or a folder, whose
            files are read in the order of their names, except hidden files; or several of these, see `parts_of`; or a
            name on the hub as in `open_rows`.
        tokenizer: the tokenizer of the model that is trained on the text.
        field: the key of the text in rows.
        cache_dir: the tokens are stored in its folder ``corpora``; see `store`. A local text is identified by
            its content, a text on the hub by its name.
        fraction: the share of the documents that is used, drawn by the seed; see `draw_documents`.
        seed: see fraction.

    Returns:
        The folder, for `open_corpus`.

    Raises:
        UserError: the text does not exist, the text or its share is empty, a row has no text, a file is not UTF-8, or
            the cache has no room.
    """
    files = text_files(reference)
    keep_ends = tokenizer.mask_token_id is None
    request = {
        "format": _FORMAT,
        "text": str(reference) if files is None else [[_kind_of(file), content_sha256(file)] for file in files],
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "line_ends": keep_ends,
        "field": field,
        # A whole text has no fraction in its key, so that caches made before this setting existed stay valid.
        **({"fraction": fraction, "seed": seed} if fraction < 1 else {}),
    }

    def write(folder: Path) -> dict[str, Any]:
        segments = read_segments(reference, files, field, keep_ends)
        if fraction < 1:
            segments = draw_documents(segments, fraction, seed)
        segments = progress(segments, "Tokenizing", "segments")
        counts = _write_tokens(folder, segments, tokenizer, lambda token: find_words(token, reference, field))
        if counts["tokens"] == 0:
            why = "holds no text; give at least one line of it"
            if fraction < 1:
                why = (
                    f"data.text.fraction {fraction} takes no document of it; raise the fraction, or give a longer text"
                )
            raise UserError(f"{reference}: {why}")
        return counts

    return store(cache_dir, "corpora", request, write, reference=str(reference))


def open_corpus(folder: Path) -> Corpus:
    """Map a tokenized text into memory. Raises UserError if it is damaged."""
    with read_meta(folder) as meta:
        # Flat arrays and not Arrow's lists: a sequence goes on over the ends of documents, and its place is searched
        # in the offsets, which lists in record batches would have each rank put together in its own memory.
        arrays = {
            name: np.memmap(folder / f"{name}.bin", array["dtype"], "r") for name, array in meta["arrays"].items()
        }
    # Plain views of the mapped offsets, because one number of a memmap costs ten times as much as one of an array.
    return Corpus(arrays["tokens"], np.asarray(arrays["segments"]), np.asarray(arrays["documents"]))


def _write_tokens(
    folder: Path, segments: Segments, tokenizer: PreTrainedTokenizerBase, place: Callable[[str], str]
) -> dict[str, Any]:
    """Write tokens and offsets piece by piece, so that a text may be larger than memory; `place` finds a token."""
    num_tokens = num_segments = num_documents = 0
    current: tuple[int, int] | None = None
    dtypes = {"tokens": token_dtype(tokenizer), "segments": np.dtype(np.int64), "documents": np.dtype(np.int64)}
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in dtypes}

        def add(name: str, values: Any) -> None:
            files[name].write(np.asarray(values, dtypes[name]).tobytes())

        for batch in pieces(segments, _AT_ONCE, lambda segment: len(segment[1])):
            encoded = _tokenize([text for _, text in batch], tokenizer)
            check_token_ids(tokenizer, encoded, lambda _, token: place(token))
            for (document, _), ids in zip(batch, encoded, strict=True):
                if not ids:  # the tokenizer drops all characters of the line
                    continue
                if document != current:
                    add("documents", num_segments)
                    num_documents, current = num_documents + 1, document
                add("segments", num_tokens)
                add("tokens", ids)
                num_tokens, num_segments = num_tokens + len(ids), num_segments + 1
        # The end of the last one, so that every piece is a slice between two offsets.
        add("segments", num_tokens)
        add("documents", num_segments)
    counts = {"tokens": num_tokens, "segments": num_segments, "documents": num_documents}
    return {**counts, "arrays": {name: {"dtype": dtype.name} for name, dtype in dtypes.items()}}


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False silences the warning about texts over the model's context; they are cut into sequences later.
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
    )
    return list(encoded["input_ids"])


def find_words(words: str, data: Data, field: str = "text") -> str:
    """Return where words first occur in a text: file and line of a plain text, file and place of a row."""
    names = by_lower_case([field])
    if not isinstance(data, str | Path):
        rows = (
            row if isinstance(row, str) else str(with_names(row, names, "data").get(field))
            for row in rows_in_memory(data)
        )
        return next((f"row {number}" for number, text in enumerate(rows, start=1) if words in text), "data")
    files: Sequence[Path | None] = text_files(data) or [None]
    for file in files:
        if file is not None and _kind_of(file) == "text":
            places = ((line, f"{file}:{number}") for number, line in enumerate(text_lines(file), start=1))
        else:
            places = (
                (str(with_names(row, names, source).get(field)), source)
                for row, source in open_rows(file or data, streaming=True)
            )
        place_of_words = next((place for text, place in places if words in text), None)
        if place_of_words is not None:
            return place_of_words
    return str(data)


def _kind_of(file: Path) -> str:
    suffix = file.suffix.lower()
    return suffix if suffix in READERS else "text"


def read_segments(reference: str | Path, files: list[Path] | None, field: str, keep_ends: bool) -> Segments:
    """Yield the segments of text files, with the number of file and document of each; `files` is None for rows."""
    if files is None:
        yield from _read_rows(0, reference, field, keep_ends)
        return
    for number, file in enumerate(files):
        if _kind_of(file) != "text":
            yield from _read_rows(number, file, field, keep_ends)
            continue
        document = 0
        for line in text_lines(file):
            if line.strip():
                yield (number, document), line if keep_ends else line.strip()
            else:
                document += 1


def draw_documents(segments: Segments, fraction: float, seed: int) -> Segments:
    """Yield the segments of one document out of each 1/fraction successive documents; the seed decides which.

    So n documents, for any n, give between ⌊n·fraction⌋ and ⌈n·fraction⌉ of them, from all parts of the text, and their
    number need not be known before the last document is read.
    """
    # Fraction("0.1") is exactly one in ten, while the float 0.1 is slightly more.
    documents_per_draw = 1 / Fraction(str(fraction))
    rng = np.random.default_rng((seed, 0, DOCUMENTS))
    drawn = group = end = 0
    for number, (_, document) in enumerate(groupby(segments, key=itemgetter(0))):
        if number == end:
            group += 1
            end = ceil(group * documents_per_draw)
            drawn = int(rng.integers(number, end))
        if number == drawn:
            yield from document


def _read_rows(file_number: int, reference: str | Path, field: str, keep_ends: bool) -> Segments:
    names = by_lower_case([field])
    for document, (row, source) in enumerate(open_rows(reference, streaming=True)):
        text = with_names(row, names, source).get(field)
        if text is None:
            raise UserError(
                f'{source}: the key "{field}" is missing (there are {sorted(row)}); '
                "name the key of the text as data.text.field"
            )
        if not isinstance(text, str):
            raise UserError(
                f'{source}: "{field}" is a {type(text).__name__}, not a string (there are {sorted(row)}); quote it, '
                "or name the key of the text as data.text.field"
            )
        # Only newlines end a line here; str.splitlines would also split at other separators.
        lines = text.split("\n")
        segments: list[str] = []
        for place, line in enumerate(lines):
            ended = line + "\n" if place < len(lines) - 1 else line
            if line.strip():
                segments.append(ended if keep_ends else line.strip())
            elif segments and keep_ends:
                segments[-1] += ended
        for segment in segments:
            yield (file_number, document), segment
