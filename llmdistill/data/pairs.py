"""Batches of sentences, or pairs of sentences, with a target for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.collate import pad_rows, padding_mask, sample_id
from llmdistill.data.store import TOKEN_IDS, Layout
from llmdistill.errors import UserError
from llmdistill.models.unembedded import check_rows


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


PAIRS = Layout(
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
    is_pair = examples[0].sentence2 is not None
    marks = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length < marks + 1 + is_pair:
        raise UserError(f"max_length is {max_length}: the tokenizer's own marks take {marks}; give more, 128 is usual")
    encoded = tokenizer(
        [example.sentence1 for example in examples],
        [example.sentence2 or "" for example in examples] if is_pair else None,
        truncation="longest_first",
        max_length=max_length,
        verbose=False,
    )
    check_rows(tokenizer, encoded["input_ids"], lambda number, _: f"row {examples[number].index + 1}")
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
