"""Reads sentences, whose embeddings are learned, and pairs of sentences with a similarity (STS), which score them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdistill.data.readers import text_lines
from llmdistill.data.references import is_weighted, parts_of
from llmdistill.data.sources import open_rows
from llmdistill.embedded import locate_data
from llmdistill.errors import UserError

FIELDS = ("text", "sentence", "sentence1", "sentence2", "anchor", "query", "positive", "negative")
"""Keys of the sentences in a row of training data."""
_PAIR = ("sentence1", "sentence2")
_TRIPLE = (("query", "anchor"), ("positive",), ("negative",))
TRIPLE = len(_TRIPLE)
"""The number of sentences of a triple."""
_SCORES = ("score", "similarity_score", "label")


@dataclass(frozen=True)
class SentencePair:
    """Two sentences and how similar they are to people."""

    sentence1: str
    sentence2: str
    score: float
    """The larger, the more similar; 0 to 5 in STS."""


def read_sentences(reference: str | Path) -> list[str]:
    """Read the sentences of a training set, or of several with commas between them, each once, in order.

    A set is a text file with a sentence on each line; an STS file (see `read_pairs`), whose scores are ignored; or
    rows in a file or on the hub (see `data.sources.read_examples`), with sentences under any of FIELDS.

    Raises:
        UserError: there is no sentence, or a row has none.
    """
    if is_weighted(reference):
        raise UserError(f"{reference}: each sentence is taken once, whatever the weights are; leave them out")
    sentences: dict[str, None] = {}  # a dict and not a set, because it keeps their order
    for part in parts_of(reference):
        path = locate_data(part.reference)
        if path.suffix.lower() == ".txt":
            sentences |= dict.fromkeys(line.strip() for line in text_lines(path) if line.strip())
        elif _is_plain(path):
            for pair in _read_plain_pairs(path):
                sentences |= {pair.sentence1: None, pair.sentence2: None}
        else:
            for row, place in open_rows(part.reference):
                texts = [row[key] for key in FIELDS if isinstance(row.get(key), str) and row[key].strip()]
                if not texts:
                    raise UserError(f"{place}: no sentence under any of {', '.join(FIELDS)}; name its column so")
                sentences |= dict.fromkeys(texts)
    if not sentences:
        raise UserError(f"{reference}: holds no sentence; give a text with a sentence on each line")
    return list(sentences)


def read_triples(reference: str | Path) -> list[str]:
    """Read the sentences of a set of rows of query (or anchor), positive and negative, in this order.

    Raises:
        UserError: there is no row, or one lacks a sentence.
    """
    path = Path(reference)
    if path.suffix.lower() == ".txt" or _is_plain(path):
        raise UserError(f"{reference}: has no rows of query, positive, negative (data.sentences.triples); name a JSONL")
    sentences: list[str] = []
    for row, place in open_rows(reference):
        texts = [next((row[key] for key in keys if key in row), None) for keys in _TRIPLE]
        triple = [text for text in texts if isinstance(text, str) and text.strip()]
        if len(triple) != TRIPLE:
            raise UserError(f"{place}: give query (or anchor), positive and negative, as data.sentences.triples says")
        sentences += triple
    if not sentences:
        raise UserError(f"{reference}: holds no row; give rows of query, positive, negative")
    return sentences


def read_pairs(reference: str | Path) -> list[SentencePair]:
    """Read pairs of sentences with a score.

    They are in a TSV file without a header and with the columns score, sentence, sentence; or in a file or data set on
    the hub with rows of sentence1, sentence2 and score (or similarity_score, or label).

    Raises:
        UserError: a row is malformed, or the scores are fewer than two or all the same, so that nothing correlates.
    """
    path = locate_data(str(reference))
    is_plain = _is_plain(path)
    pairs = list(_read_plain_pairs(path)) if is_plain else []
    for row, place in () if is_plain else open_rows(reference):
        texts = [row.get(key) for key in _PAIR]
        score = next((_parse_number(row[key]) for key in _SCORES if key in row), None)
        if score is None or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(f"{place}: give {', '.join(_PAIR)} and a number as score, similarity_score or label")
        pairs.append(SentencePair(str(texts[0]), str(texts[1]), score))
    if len({pair.score for pair in pairs}) < 2:
        raise UserError(f"{reference}: {len(pairs)} pairs with no two different scores; give pairs whose scores differ")
    return pairs


def _is_plain(path: Path) -> bool:
    """Return whether a file is a TSV without a header, which begins with a number."""
    if path.suffix.lower() != ".tsv" or not os.path.isfile(path):
        return False
    return _parse_number(next(text_lines(path), "").split("\t")[0]) is not None


def _read_plain_pairs(path: Path) -> Iterator[SentencePair]:
    for number, line in enumerate(text_lines(path), start=1):
        cells = line.rstrip("\r\n").split("\t")
        score = _parse_number(cells[0])
        if len(cells) != 3 or score is None or not cells[1].strip() or not cells[2].strip():
            raise UserError(f"{path}:{number}: not a score and two sentences, separated by tabs; fix the line")
        yield SentencePair(cells[1], cells[2], score)


def _parse_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
