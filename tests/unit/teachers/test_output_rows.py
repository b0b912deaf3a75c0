"""A teacher's outputs as rows of single examples and back; the losses of a cache are in tests/unit/teachers/cache."""

from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from llmdistill.batch import HeadInputs, TopK
from llmdistill.data.collate import Encoded, collate
from llmdistill.losses.top_k import most_likely
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder
from llmdistill.teachers.output_rows import Request, rows_of_samples, to_outputs, to_rows

NOTHING = Request(positions=(), temperatures=(), taps={}, sequences=False)


def test_most_likely_tokens_come_from_the_shared_vocabulary():
    request = replace(NOTHING, positions=("labels",), temperatures=(1.0, 2.0))
    items = [Encoded([5, 6, 7], [8, 1]), Encoded([9], [10, 11, 1]), Encoded([3, 4], [5, 1])]
    batch = collate(items, 0).with_positions(shift=True)
    model = tiny_model("llama")
    with torch.no_grad():
        outputs = TappedModel(model, Recorder(model, request.taps)).compute_targets(batch, lm_head=request.positions)
    rows = to_rows(outputs, batch, request, top_k=4, vocabulary=15)
    found = to_outputs(rows.__getitem__, batch, request, top_k=4, head=None, scaling={}).lm_head["labels"]
    head = outputs.lm_head["labels"]
    assert isinstance(head, HeadInputs)
    expected = most_likely((head.rows @ head.weight.T)[:, :15], 4, (1.0, 2.0))
    assert isinstance(found, TopK)
    torch.testing.assert_close(found, expected)


def test_an_example_without_labels_has_no_rows_wherever_it_stands():
    items = [Encoded([9], []), Encoded([5, 6], [8, 1]), Encoded([3, 4], [])]
    batch = collate(items, 0).with_positions(shift=True)
    assert rows_of_samples(batch, "labels").tolist() == [0, 2, 0]
    assert rows_of_samples(batch, "tokens").tolist() == [1, 4, 2]


@pytest.mark.parametrize(("needs", "lacking"), [
    ({}, None),
    ({"positions": ("tokens",)}, "the distributions at tokens"),
    ({"temperatures": (3.0,)}, "the mass of the rest at temperature 3"),
    ({"taps": {"embedding": frozenset({0})}}, "the embedding"),
    ({"sequences": True}, "the output of the classifier"),
])  # fmt: skip
def test_what_a_cache_lacks_is_named(needs, lacking):
    held = replace(NOTHING, positions=("labels",), temperatures=(1.0,), taps={"query": frozenset({1, 2})})
    request = replace(replace(held, taps={"query": frozenset({2})}), **needs)
    assert request.find_missing({**held.record(), "top_k": 4}) == lacking
    if "temperatures" in needs:
        assert request.find_missing({**held.record(), "top_k": None}) is None
