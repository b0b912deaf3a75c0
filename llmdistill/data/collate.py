"""From encoded examples to one right-padded batch: an example a row, or several packed into one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.instruct import Encoded


def collate(items: Sequence[Encoded], pad_token_id: int, *, pad_to_multiple_of: int | None = None) -> Batch:
    """Prompt and response side by side, (B, T), padded on the right to the longest (or the next multiple).

    Labels stand on the response alone, its end token included; the mask comes from the lengths, so that an
    end token that doubles as padding is seen and learnt.
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
    """The examples side by side in rows of at most max_length, as `pack` puts them: (B, T) with B <= len(items).

    The mask numbers the examples of a row from 1, and positions begin at 0 in each; so they do in the padding at the
    end of a row, whose mask is 0. The first token of an example is never a label: what stands before it in its row is
    another's.
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
    """Which of these stand in which row of at most max_length: indices, row by row.

    First-fit decreasing says how many rows it takes. So many, or more, are then also filled evenly, the longest next
    into the emptiest, and of all these the one with the fewest positions (rows times the longest) is taken: a last row
    that is half empty would be padded to the others, and seven rows for sixteen equal examples to three in each.
    """
    assert max(lengths) <= max_length, "an example is longer than a row"
    order = sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True)
    best = _first_fit(order, lengths, max_length)

    def positions(rows: list[list[int]]) -> int:
        return len(rows) * max(sum(lengths[index] for index in row) for row in rows)

    for count in range(len(best), len(lengths) + 1):
        rows = _fill_evenly(order, lengths, count)
        if positions(rows) < positions(best):  # so no row is too long: more than max_length would take more positions
            best = rows
    return best


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Each into the first row that has room for it."""
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
    """Each into the row that is emptiest so far."""
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in order:
        row = filled.index(min(filled))
        rows[row].append(index)
        filled[row] += lengths[index]
    return rows
