"""Encoded examples, and the right-padded batches that they are collated into: one example per row, or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llmdistill.batch import IGNORE_INDEX, Batch


def sample_id(*parts: Sequence[int] | np.ndarray) -> int:
    """Return the id of a sample: a hash of its tokens, from 0 to 2^63 - 1, the same in every run, batch and rank.

    The parts are token ids in order, such as those of the prompt and those of the response; the hash also depends on
    where one part ends and the next begins.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        tokens = np.asarray(part, dtype=np.int64)
        # The length shows where a part ends, so that [1, 2], [3] and [1], [2, 3] have different ids.
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1  # 63 bits fit into int64


@dataclass(frozen=True)
class Encoded:
    """The tokens of one prompt with its response, or of a conversation, whose answers are learned."""

    prompt_ids: list[int]
    """Up to the first token that is learned."""
    response_ids: list[int]
    """Up to the last token that is learned: the end token, unless the response was cut."""
    teacher: str = ""
    """The name of the teacher that the example asks for; empty if it names none."""
    gaps: tuple[tuple[int, int], ...] = ()
    """The tokens of the response, from and up to, that are not learned: what stands between answers."""
    rest_ids: list[int] = field(default_factory=list)
    """What a chat template writes after the last answer, such as a newline: read, but not learned."""
    asked_ids: list[int] | None = None
    """The prompt of the last answer, for a student that answers it itself; None if it is prompt_ids. Read it by
    `last_prompt`; this is also the name of its column on disk."""

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids + self.rest_ids

    @property
    def last_prompt(self) -> list[int]:
        return self.prompt_ids if self.asked_ids is None else self.asked_ids

    @property
    def borders(self) -> list[int]:
        """Where in `ids` the learned parts begin and end: begin, end, begin, end, ..."""
        inner = (place for gap in self.gaps for place in gap)
        return [len(self.prompt_ids) + place for place in (0, *inner, len(self.response_ids))]

    @classmethod
    def of(cls, ids: list[int], borders: Sequence[int], teacher: str, asked_ids: list[int] | None) -> Encoded:
        """Make an example from its tokens and the borders of its learned parts, of which there is at least one."""
        first, *inner, last = borders
        gaps = tuple((end - first, begin - first) for end, begin in zip(inner[::2], inner[1::2], strict=True))
        return cls(ids[:first], ids[first:last], teacher, gaps, ids[last:], asked_ids)

    @cached_property
    def sample_id(self) -> int:
        ids, borders = self.ids, [0, *self.borders]
        ends = [*borders[1:], len(ids)] if self.rest_ids else borders[1:]
        # Without tokens after the last answer the last border begins no part, hence not strict.
        return sample_id(*(ids[begin:end] for begin, end in zip(borders, ends, strict=False)))

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids) + len(self.rest_ids)


def pad_rows(rows: Sequence[Sequence[int] | np.ndarray | Tensor], padding: int) -> Tensor:
    """Return the rows as one tensor of int64, padded on the right to the longest row."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


def padding_mask(rows: Sequence[Sequence[int] | np.ndarray]) -> Tensor:
    """Return the attention mask of padded rows: 1 at tokens, 0 at padding."""
    return pad_rows([torch.ones(len(row)) for row in rows], 0)


def collate(items: Sequence[Encoded], pad_token_id: int) -> Batch:
    """Collate each prompt with its response, (B, T), padded on the right to the longest row.

    Only the learned tokens of the response are labels, its end token included. The mask follows from the lengths, so
    an end token that is also the padding token is attended to and learned.
    """
    rows = [item.ids for item in items]
    return Batch(
        pad_rows(rows, pad_token_id),
        padding_mask(rows),
        pad_rows([_make_labels(item) for item in items], IGNORE_INDEX),
        sample_ids=tuple((item.sample_id,) for item in items),
        teachers=tuple(item.teacher for item in items),
    )


def collate_packed(items: Sequence[Encoded], pad_token_id: int, *, max_length: int) -> Batch:
    """Collate the examples into rows of at most max_length, arranged by `pack_rows`: (B, T) with B <= len(items).

    The examples of a row ask for the same teacher. The mask numbers them from 1, and positions begin at 0 in each
    example. Positions also begin at 0 in the padding at the end of a row, whose mask is 0. The first token of an
    example is never a label, because the token before it belongs to another example.
    """
    rows: list[list[Encoded]] = []
    # Not a set: the order of the rows must be the same on every rank and in every run.
    for teacher in dict.fromkeys(item.teacher for item in items):
        own = [item for item in items if item.teacher == teacher]
        rows += [[own[index] for index in row] for row in pack_rows([len(item) for item in own], max_length)]
    width = max(sum(map(len, row)) for row in rows)
    numbers = [[number for number, item in enumerate(row, start=1) for _ in item.ids] for row in rows]
    # The padding gets positions from 0 like one more example, so that it never continues the example before it where a
    # model reads the borders of the examples from the positions.
    lengths = [[*map(len, row), width - sum(map(len, row))] for row in rows]
    positions = [[position for length in row for position in range(length)] for row in lengths]
    return Batch(
        pad_rows([[token for item in row for token in item.ids] for row in rows], pad_token_id),
        pad_rows(numbers, 0),
        pad_rows([[label for item in row for label in _make_labels(item, first=1)] for row in rows], IGNORE_INDEX),
        position_ids=pad_rows(positions, 0),
        sample_ids=tuple(tuple(item.sample_id for item in row) for row in rows),
        teachers=tuple(row[0].teacher for row in rows),
    )


def _make_labels(item: Encoded, *, first: int = 0) -> list[int]:
    """Return the label of each token: the tokens of the learned parts, but none before the position `first`."""
    ids, borders = item.ids, item.borders
    labels = [IGNORE_INDEX] * len(ids)
    for begin, end in zip(borders[::2], borders[1::2], strict=True):
        begin = max(begin, first)
        labels[begin:end] = ids[begin:end]
    return labels


def pack_rows(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Arrange examples of these lengths in rows of at most max_length: the indices of each row.

    First-fit decreasing gives a number of rows. For this number and all larger ones the rows are also filled evenly:
    the longest remaining example goes into the emptiest row. Of all these arrangements the one with the fewest
    positions (rows times the longest row) is chosen. A half-empty last row would be padded to the length of the others,
    and sixteen equal examples in seven rows would be padded to three in each row; eight rows of two need no padding.
    """
    assert max(lengths) <= max_length, "an example is longer than a row"
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    # First-fit decreasing.
    best: list[list[int]] = []
    filled: list[int] = []
    for index in order:
        fits = (row for row, used in enumerate(filled) if used + lengths[index] <= max_length)
        row = next(fits, len(best))
        if row == len(best):
            best.append([])
            filled.append(0)
        best[row].append(index)
        filled[row] += lengths[index]

    def positions(rows: list[list[int]]) -> int:
        return len(rows) * max(sum(lengths[index] for index in row) for row in rows)

    # From the fewest rows on: among equals the first arrangement, with fewer rows, stays.
    for count in range(len(best), len(lengths) + 1):
        rows: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for index in order:
            row = filled.index(min(filled))
            rows[row].append(index)
            filled[row] += lengths[index]
        if positions(rows) < positions(best):  # no row can be too long: rows over max_length take more positions
            best = rows
    return best
