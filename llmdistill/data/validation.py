"""The validation set as batches that every rank can walk in step with the others."""

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
    """One rank's share, the same number of batches on each (a sharded model needs all ranks in every forward pass).

    A rank that would have one batch less repeats its first, without labels, so that nothing counts twice.
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
