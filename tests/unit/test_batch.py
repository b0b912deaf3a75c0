"""What a batch says of its sequences' targets, whatever their form."""

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
    counts = {name: int(count) for name, count in batch.counts().items()}
    assert counts == {"tokens": 15, "labels": 12, "sequences": sum(known)}, "a first token is no label"
    assert batch.to("cpu").sample_ids == ((1,), (2,), (3,))


def test_more_padding_changes_no_position():
    ids = torch.arange(3, 17).view(2, 7)
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    batch = Batch(
        ids, mask, ids.masked_fill(mask == 0, -100), visible_until=torch.full_like(ids, 7), targets=torch.ones(2)
    )
    longer = batch.pad_to_multiple(4, longest=16)
    assert longer.input_ids.shape == (2, 8)
    assert torch.equal(longer.input_ids[:, :7], ids)
    assert [longer.attention_mask[:, 7].tolist(), longer.labels[:, 7].tolist()] == [[0, 0], [-100, -100]]
    assert longer.visible_until[:, 7].tolist() == [8, 8]
    assert longer.counts() == batch.counts()
    assert longer.targets is batch.targets
    assert batch.pad_to_multiple(64, longest=12).input_ids.shape == (2, 12)
    assert batch.pad_to_multiple(7, longest=16) is batch
    assert batch.pad_to_multiple(64, longest=7) is batch
