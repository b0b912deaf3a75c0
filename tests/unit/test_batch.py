"""What a batch says of its sequences' targets, whatever their form."""

from __future__ import annotations

import math

import pytest
import torch

from llmdistill.batch import IGNORE_INDEX, Batch

CASES = {
    "classes": (torch.tensor([1, IGNORE_INDEX, 0]), [True, False, True]),
    "scores": (torch.tensor([math.nan, 2.5, 0.0]), [False, True, True]),
    "spans": (torch.tensor([[4, 7], [IGNORE_INDEX, IGNORE_INDEX], [0, 0]]), [True, False, True]),
    "several labels": (torch.tensor([[1.0, 0.0], [math.nan, 1.0], [math.nan, math.nan]]), [True, True, False]),
    "none": (None, [False, False, False]),
}


@pytest.mark.parametrize(("targets", "known"), CASES.values(), ids=list(CASES))
def test_which_sequences_have_a_target(targets, known):
    ids = torch.ones(3, 5, dtype=torch.long)
    batch = Batch(ids, ids, ids, targets=targets, sample_ids=((1,), (2,), (3,)))
    assert batch.has_target().tolist() == known
    assert int(batch.counts()["sequences"]) == sum(known)
    assert batch.to("cpu").sample_ids == ((1,), (2,), (3,))
