"""Collates encoded examples into one right-padded batch, with one example per row or several packed into one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.instruct import Encoded


def collate(items: Sequence[Encoded], pad_token_id: int, *, pad_to_multiple_of: int | None = None) -> Batch:
    """Collate each prompt with its response, (B, T), padded on the right to the longest row (or to the next multiple).

    Only the tokens of the response are labels, its end token included. The mask follows from the lengths, so an end
    token that is also the padding token is attended to and learnt.
    """
    lengths = [len(item) for item in items]
    width = max(lengths)
    if pad_to_multiple_of is not None:
        width = -(-width // pad_to_multiple_of) * pad_to_multiple_of
    input_ids = torch.full((len(items), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for row, (item, length) in enumerate(zip(items, lengths, strict=True)):
        start = len(item.prompt_ids)
        input_ids[row, :length] = torch.tensor(item.prompt_ids + item.response_ids)
        attention_mask[row, :length] = 1
        labels[row, start:length] = input_ids[row, start:length]
    return Batch(input_ids, attention_mask, labels, sample_ids=tuple((item.sample_id,) for item in items))


def collate_packed(items: Sequence[Encoded], pad_token_id: int, *, max_length: int) -> Batch:
    """Collate the examples into rows of at most max_length, arranged by `pack`: (B, T) with B <= len(items).

    The mask numbers the examples of a row from 1, and positions begin at 0 in each example. Positions also begin at 0
    in the padding at the end of a row, whose mask is 0. The first token of an example is never a label, because the
    token before it belongs to another example.
    """
    rows = pack([len(item) for item in items], max_length)
    width = max(sum(len(items[index]) for index in row) for row in rows)
    input_ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    position_ids = torch.zeros_like(input_ids)
    for place, row in enumerate(rows):
        start = 0
        for number, index in enumerate(row, start=1):
            item = items[index]
            end = start + len(item)
            learnt = start + max(1, len(item.prompt_ids))
            input_ids[place, start:end] = torch.tensor(item.prompt_ids + item.response_ids)
            attention_mask[place, start:end] = number
            labels[place, learnt:end] = input_ids[place, learnt:end]
            position_ids[place, start:end] = torch.arange(len(item))
            start = end
        position_ids[place, start:] = torch.arange(width - start)
    sample_ids = tuple(tuple(items[index].sample_id for index in row) for row in rows)
    return Batch(input_ids, attention_mask, labels, position_ids=position_ids, sample_ids=sample_ids)


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Arrange examples of these lengths in rows of at most max_length: the indices of each row.

    First-fit decreasing gives a number of rows. For this number and all larger ones the rows are also filled evenly:
    the longest remaining example goes into the emptiest row. Of all these arrangements the one with the fewest
    positions (rows times the longest row) is chosen. A half-empty last row would be padded to the length of the others,
    and sixteen equal examples in seven rows would be padded to three in each row; eight rows of two need no padding.
    """
    assert max(lengths) <= max_length, "an example is longer than a row"
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    best = _first_fit(order, lengths, max_length)

    def positions(rows: list[list[int]]) -> int:
        return len(rows) * max(sum(lengths[index] for index in row) for row in rows)

    for count in range(len(best), len(lengths) + 1):
        rows = _fill_evenly(order, lengths, count)
        if positions(rows) < positions(best):  # no row can be too long: rows over max_length take more positions
            best = rows
    return best


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Put each example into the first row that has room for it."""
    rows: list[list[int]] = []
    filled: list[int] = []
    for index in order:
        fits = (row for row, used in enumerate(filled) if used + lengths[index] <= max_length)
        row = next(fits, len(rows))
        if row == len(rows):
            rows.append([])
            filled.append(0)
        rows[row].append(index)
        filled[row] += lengths[index]
    return rows


def _fill_evenly(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Put each example into the row that is emptiest so far."""
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in order:
        row = filled.index(min(filled))
        rows[row].append(index)
        filled[row] += lengths[index]
    return rows
