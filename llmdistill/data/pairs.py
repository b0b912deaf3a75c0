"""Sentences and pairs of sentences: sets whose embeddings are learned or scored, and batches with a target for each."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.collate import pad_rows, padding_mask, sample_id
from llmdistill.data.readers import by_lower_case, text_lines, with_names
from llmdistill.data.references import is_weighted, parts_of
from llmdistill.data.sources import open_rows
from llmdistill.data.store import TOKEN_IDS, Schema
from llmdistill.embedded import locate_data
from llmdistill.errors import UserError
from llmdistill.messages import say
from llmdistill.models.unembedded import check_token_ids

_TRIPLE = (("query", "anchor", "question"), ("positive", "pos", "answer"), ("negative", "neg"))
"""Keys of the sentences of a triple; pos and neg are FlagEmbedding's lists."""
TRIPLE = len(_TRIPLE)
"""The number of sentences of a triple."""
FIELDS = ("text", "sentence", *(key for keys in _TRIPLE for key in keys), "premise", "hypothesis")
"""Keys of the sentences in a row of training data; each may have a number (sentence1, negative_3) or hold a list."""
_NUMBER = re.compile(r"_?(\d+|[ab])$")
"""What follows such a key where a row has several; SICK has sentence_A and sentence_B."""
_PAIR = (("sentence1", "sentence_a"), ("sentence2", "sentence_b"))
_SCORES = ("score", "similarity_score", "relatedness_score", "label")
_PAIR_NAMES = by_lower_case((*_PAIR[0], *_PAIR[1], *_SCORES))
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class PairExample:
    """A sentence, or a pair of sentences, with its target."""

    sentence1: str
    sentence2: str | None
    target: int | float | None
    """Class (index into the task's classes) or score; None in a test split."""
    index: int
    """The number of the example on the GLUE server (test), else the number of its row, from 0."""


@dataclass(frozen=True)
class EncodedPair:
    input_ids: list[int]
    token_type_ids: list[int] | None
    """0 in the first and 1 in the second sentence; None for models without segments."""
    target: int | float | None
    index: int = field(default=0, compare=False)
    """The number of the example; see PairExample."""

    @cached_property
    def sample_id(self) -> int:
        return sample_id(self.input_ids, self.token_type_ids or [])

    def __len__(self) -> int:
        return len(self.input_ids)


PAIRS = Schema(
    make=lambda input_ids, token_type_ids, target, index: EncodedPair(
        input_ids.tolist(), None if token_type_ids is None else token_type_ids.tolist(), target, index
    ),
    columns={"input_ids": TOKEN_IDS, "token_type_ids": pa.list_(pa.uint8()), "target": None, "index": pa.int64()},
)
"""How encoded pairs are stored on disk."""


def encode_pairs(
    examples: Sequence[PairExample], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[EncodedPair]:
    """Tokenize each example, with special tokens around and between the sentences; the longer sentence is cut first.

    A tokenizer without such special tokens (GPT-2's) puts the two sentences side by side with nothing between them.

    Raises:
        UserError: max_length leaves no room beside the special tokens.
    """
    if not examples:
        return []
    is_pair = examples[0].sentence2 is not None  # a set has sentences or pairs, never both
    marks = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length < marks + 1 + is_pair:  # a token at least of each sentence
        raise UserError(f"max_length is {max_length}: the tokenizer's own marks take {marks}; give more, 128 is usual")
    encoded = tokenizer(
        [example.sentence1 for example in examples],
        [example.sentence2 or "" for example in examples] if is_pair else None,
        truncation="longest_first",
        max_length=max_length,
        verbose=False,
    )
    check_token_ids(tokenizer, encoded["input_ids"], lambda number, _: f"row {examples[number].index + 1}")
    types = encoded.get("token_type_ids") or [None] * len(examples)
    rows = zip(encoded["input_ids"], types, examples, strict=True)
    return [EncodedPair(ids, type_ids, example.target, example.index) for ids, type_ids, example in rows]


def collate_pairs(items: Sequence[Any], pad_token_id: int) -> Batch:
    """Collate examples into a right-padded batch (B, T) with targets for sequences (of windows (B, 2), start and end).

    Targets are fp32 if any target is a score (NaN if unknown), else int64 (IGNORE_INDEX if unknown); no token is a
    label.
    """
    rows = [item.input_ids for item in items]
    input_ids = pad_rows(rows, pad_token_id)
    has_types = items[0].token_type_ids is not None
    targets = [item.target for item in items]
    unknown: float
    if any(isinstance(target, float) for target in targets):
        unknown, dtype = float("nan"), torch.float32
    else:
        unknown, dtype = IGNORE_INDEX, torch.long
    return Batch(
        input_ids,
        padding_mask(rows),
        labels=torch.full_like(input_ids, IGNORE_INDEX),
        token_type_ids=pad_rows([item.token_type_ids for item in items], 0) if has_types else None,
        targets=torch.tensor([unknown if target is None else target for target in targets], dtype=dtype),
        sample_ids=tuple((item.sample_id,) for item in items),
    )


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
    rows in a file or on the hub (see `data.sources.read_examples`), with sentences under any of FIELDS. A note names
    the columns of texts that are not read.

    Raises:
        UserError: there is no sentence, or a row has none.
    """
    if is_weighted(reference):
        raise UserError(f"{reference}: each sentence is taken once, whatever the weights are; leave them out")
    sentences: dict[str, None] = {}  # a dict and not a set, because it keeps their order
    for part in parts_of(reference):
        path, unread = locate_data(part.reference), Counter[str]()
        if path.suffix.lower() == ".txt":
            sentences |= dict.fromkeys(line.strip() for line in text_lines(path) if line.strip())
        elif _is_plain(path):
            for pair in _read_plain_pairs(path):
                sentences |= {pair.sentence1: None, pair.sentence2: None}
        else:
            for row, place in open_rows(part.reference):
                by_field = _sentences_by_field(row)
                texts = [text for key in FIELDS for text in by_field.get(key, ())]
                if not texts:
                    raise UserError(f"{place}: no sentence under any of {', '.join(FIELDS)}; name its column so")
                sentences |= dict.fromkeys(texts)
                # A text has several words; a word alone may be an id, a genre or a language.
                others = by_field.keys() - set(FIELDS)
                unread.update(key for key in others if any(" " in text.strip() for text in by_field[key]))
        if unread:
            columns = "; ".join(f"{key} of {count:,} rows" for key, count in sorted(unread.items()))
            say(f"{part.reference}: not read as sentences: {columns}.", aside=True)
    if not sentences:
        raise UserError(f"{reference}: holds no sentence; give a text with a sentence on each line")
    return list(sentences)


def _sentences_by_field(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the texts of a row by their keys; those of FIELDS are in lower case and without their numbers."""
    texts: dict[str, list[str]] = {}
    for key, value in row.items():
        name = str(key).strip().lower()
        name = next((each for each in (name, _NUMBER.sub("", name)) if each in FIELDS), str(key))
        cells = value if isinstance(value, list) else [value]
        texts.setdefault(name, []).extend(cell for cell in cells if isinstance(cell, str) and cell.strip())
    return texts


def read_triples(reference: str | Path) -> list[str]:
    """Read the sentences of a set of rows of query (or anchor), positive and negative, in this order.

    A row with several positives or negatives has a triple for each pair of them.

    Raises:
        UserError: there is no row, or one lacks a sentence.
    """
    path = Path(reference)
    if path.suffix.lower() == ".txt" or _is_plain(path):
        raise UserError(f"{reference}: has no rows of query, positive, negative (data.sentences.triples); name a JSONL")
    sentences: list[str] = []
    for row, place in open_rows(reference):
        by_field = _sentences_by_field(row)
        parts = [next((by_field[key] for key in keys if by_field.get(key)), []) for keys in _TRIPLE]
        if not all(parts):
            raise UserError(f"{place}: give query (or anchor), positive and negative, as data.sentences.triples says")
        for triple in product(*parts):
            sentences += triple
    if not sentences:
        raise UserError(f"{reference}: holds no row; give rows of query, positive, negative")
    return sentences


def read_pairs(reference: str | Path) -> list[SentencePair]:
    """Read pairs of sentences with a score.

    They are in a TSV file without a header and with the columns score, sentence, sentence; or in a file or data set on
    the hub with rows of sentence1, sentence2 and score (or similarity_score, or label; or SICK's columns).

    Raises:
        UserError: a row is malformed, or the scores are fewer than two or all the same, so that nothing correlates.
    """
    path = locate_data(str(reference))
    is_plain = _is_plain(path)
    pairs = list(_read_plain_pairs(path)) if is_plain else []
    for given, place in () if is_plain else open_rows(reference):
        row = {key: cell for key, cell in with_names(given, _PAIR_NAMES, place).items() if cell is not None}
        texts = [next((row[key] for key in keys if key in row), None) for keys in _PAIR]
        score = next((parse_number(row[key]) for key in _SCORES if key in row), None)
        if score is None or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(
                f"{place}: give sentence1, sentence2 and a number as score, similarity_score or label (there are "
                f"{', '.join(map(str, row)) or 'none'})"
            )
        pairs.append(SentencePair(str(texts[0]), str(texts[1]), score))
    if len({pair.score for pair in pairs}) < 2:
        raise UserError(f"{reference}: {len(pairs)} pairs with no two different scores; give pairs whose scores differ")
    return pairs


def _is_plain(path: Path) -> bool:
    """Return whether a file is a TSV without a header, which begins with a number."""
    if path.suffix.lower() != ".tsv" or not os.path.isfile(path):
        return False
    return parse_number(next(text_lines(path), "").split("\t")[0]) is not None


def _read_plain_pairs(path: Path) -> Iterator[SentencePair]:
    for number, line in enumerate(text_lines(path), start=1):
        cells = line.rstrip("\r\n").split("\t")
        score = parse_number(cells[0])
        if len(cells) != 3 or score is None or not cells[1].strip() or not cells[2].strip():
            raise UserError(f"{path}:{number}: not a score and two sentences, separated by tabs; fix the line")
        yield SentencePair(cells[1], cells[2], score)


def parse_number(value: Any) -> float | None:
    """Return a number, in a text also with a decimal comma, as spreadsheets write it in many languages; None if it is
    no finite number."""
    if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()):
        value = value.replace(",", ".")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
