"""A teacher's outputs as rows of single examples and back; the losses of a cache are in tests/unit/run/cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from llmdistill.batch import Batch, HeadInputs, TopK
from llmdistill.data.collate import Encoded, collate
from llmdistill.losses.top_k import most_likely
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder
from llmdistill.teacher.rows import Request, rows_of_samples, to_outputs, to_rows

NOTHING = Request(positions=(), temperatures=(), taps={}, sequences=False)


@torch.no_grad()
def taught(model, batch, request: Request):
    tapped = TappedModel(model, Recorder(model, request.taps))
    outputs = tapped.teach(batch, lm_head=request.positions)
    tapped.remove()
    return outputs


def test_an_encoder_has_rows_at_labels_and_at_all_tokens():
    ids = torch.tensor([[2, 4, 5, 6, 3], [2, 7, 3, 0, 0], [2, 8, 9, 3, 0]])
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[0, 3], labels[2, 1], labels[2, 2] = 4, 6, 8, 9
    mask = (ids != 0).long()
    batch = Batch(ids, mask, labels, sample_ids=((1,), (2,), (3,))).with_label_rows(shift=False)
    request = replace(NOTHING, positions=("labels", "tokens"), taps={"hidden": frozenset({1})})
    assert rows_of_samples(batch, "labels").tolist() == [2, 0, 2]
    assert rows_of_samples(batch, "tokens").tolist() == [5, 3, 4]
    outputs = taught(tiny_model("bert"), batch, request)
    rows = to_rows(outputs, batch, request, top_k=None, vocabulary=None)
    head = outputs.lm_head["labels"]
    found = to_outputs(rows.__getitem__, batch, request, top_k=None, head=head, scaling={})
    assert found.lm_head["labels"].bias is not None
    for place in request.positions:
        torch.testing.assert_close(found.lm_head[place].rows, outputs.lm_head[place].rows)
    ours, theirs = (each.taps.hidden[1] for each in (found, outputs))
    torch.testing.assert_close(ours, theirs * mask[..., None])


def test_most_likely_tokens_come_from_the_shared_vocabulary():
    request = replace(NOTHING, positions=("labels",), temperatures=(1.0, 2.0))
    items = [Encoded([5, 6, 7], [8, 1]), Encoded([9], [10, 11, 1]), Encoded([3, 4], [5, 1])]
    batch = collate(items, 0).with_label_rows(shift=True)
    outputs = taught(tiny_model("llama"), batch, request)
    rows = to_rows(outputs, batch, request, top_k=4, vocabulary=15)
    found = to_outputs(rows.__getitem__, batch, request, top_k=4, head=None, scaling={}).lm_head["labels"]
    head = outputs.lm_head["labels"]
    assert isinstance(head, HeadInputs)
    expected = most_likely((head.rows @ head.weight.T)[:, :15], 4, (1.0, 2.0))
    assert isinstance(found, TopK)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("needs", "lacking"),
    [
        ({}, None),
        ({"positions": ("tokens",)}, "the distributions at tokens"),
        ({"temperatures": (3.0,)}, "the tail's mass at temperature 3"),
        ({"taps": {"query": frozenset({1, 4})}}, "the query of layer 5"),
        ({"taps": {"embedding": frozenset({0})}}, "the embedding"),
        ({"sequences": True}, "the output of the classifier"),
    ],
)
def test_what_a_cache_lacks_is_named(needs, lacking):
    held = replace(NOTHING, positions=("labels",), temperatures=(1.0,), taps={"query": frozenset({1, 2})})
    request = replace(replace(held, taps={"query": frozenset({2})}), **needs)
    assert request.lacking({**held.record(), "top_k": 4}) == lacking
    if "temperatures" in needs:
        assert request.lacking({**held.record(), "top_k": None}) is None
