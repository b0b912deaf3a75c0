"""The validation set as batches; all ranks get the same number of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.collate import collate
from llmdistill.data.instruct import Encoded


def validation_batches(
    items: Sequence[Encoded], *, pad_token_id: int, batch_size: int, rank: int, world_size: int
) -> list[Batch]:
    """One rank's share; all ranks get equally many batches (a sharded model needs all ranks in every forward pass).

    A rank with one batch less repeats its first batch, without labels, so that no example counts twice.
    """
    ordered = sorted(items, key=len)
    parts = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    batches = [collate(part, pad_token_id) for part in parts]
    share = batches[rank::world_size]
    rounds = -(-len(batches) // world_size)
    if len(share) < rounds:
        first = batches[0]
        share.append(replace(first, labels=torch.full_like(first.labels, IGNORE_INDEX)))
    return share
