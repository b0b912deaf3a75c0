"""From encoded examples to one right-padded batch."""

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
    lengths = [len(item.prompt_ids) + len(item.response_ids) for item in items]
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
    return Batch(input_ids, attention_mask, labels)
