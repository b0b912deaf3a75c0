"""A teacher's outputs as rows of single examples and back: equal at real tokens, whatever stands beside an example."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from llmdistill.batch import Batch, HeadInputs, TopK
from llmdistill.data.collate import Encoded, collate, collate_packed
from llmdistill.losses.top_k import most_likely
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder
from llmdistill.teacher.rows import Request, place_of, rows_of_samples, to_outputs, to_rows

ITEMS = [Encoded([5, 6, 7], [8, 1]), Encoded([9], [10, 11, 1]), Encoded([12, 13, 14, 15], [1]), Encoded([3, 4], [5, 1])]
SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TAPS = {"query": frozenset({0, 1}), "value": frozenset({1}), "ffn_down": frozenset({0}), "embedding": frozenset({0})}
NOTHING = Request(positions=(), temperatures=(), taps={}, sequences=False)


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, attn_implementation="sdpa")).eval()


def masked() -> Batch:
    """Three sentences of an encoder: the first and the last have two labels, the second has none."""
    ids = torch.tensor([[2, 4, 5, 6, 3], [2, 7, 3, 0, 0], [2, 8, 9, 3, 0]])
    labels = torch.full_like(ids, -100)
    labels[0, 1], labels[0, 3], labels[2, 1], labels[2, 2] = 4, 6, 8, 9
    mask = (ids != 0).long()
    return Batch(ids, mask, labels, sample_ids=((1,), (2,), (3,))).with_label_rows(shift=False)


@torch.no_grad()
def taught(model, batch, request: Request):
    tapped = TappedModel(model, Recorder(model, request.taps))
    outputs = tapped.teach(batch, lm_head=request.positions)
    tapped.remove()
    return outputs


def assert_same(found, expected, batch, request):
    real_BT = batch.attention_mask != 0
    for aspect, layers in request.taps.items():
        for layer in layers:
            ours, theirs = (getattr(each.taps, aspect)[layer] for each in (found, expected))
            assert ours.shape == theirs.shape
            if ours.dim() == 4:
                ours, theirs = ours.transpose(1, 2), theirs.transpose(1, 2)
            torch.testing.assert_close(ours[real_BT], theirs[real_BT], rtol=1e-5, atol=1e-6)
            assert not ours[~real_BT].any()
    assert found.taps.scaling == expected.taps.scaling
    for place in request.positions:
        torch.testing.assert_close(found.lm_head[place].rows, expected.lm_head[place].rows, rtol=1e-5, atol=1e-6)
    if request.sequences:
        torch.testing.assert_close(found.sequence_logits, expected.sequence_logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_a_decoder_fit_any_batch_of_its_examples(llama, packed):
    request = replace(NOTHING, positions=("labels",), taps=TAPS)
    first = collate(ITEMS, 0).with_label_rows(shift=True)
    outputs = taught(llama, first, request)
    rows = to_rows(outputs, first, request, top_k=None, vocabulary=None)
    again = list(reversed(ITEMS))
    second = collate_packed(again, 0, max_length=9) if packed else collate(again, 0)
    second = second.with_label_rows(shift=True)
    if packed:
        assert len(second.input_ids) < len(ITEMS)
    # The rows in the order in which the examples stand in the second batch.
    known = [item.sample_id for item in ITEMS]
    order = [known.index(each) for row in second.sample_ids for each in row]
    sizes = {name: rows_of_samples(first, place_of(name)).tolist() for name in rows}
    placed = {name: torch.cat([tensor.split(sizes[name])[n] for n in order]) for name, tensor in rows.items()}
    head = outputs.lm_head["labels"]
    found = to_outputs(placed.__getitem__, second, request, top_k=None, head=head, scaling=outputs.taps.scaling)
    assert_same(found, taught(llama, second, request), second, request)


def test_an_encoder_has_rows_at_labels_and_at_all_tokens():
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**SIZES, attn_implementation="sdpa")).eval()
    request = replace(NOTHING, positions=("labels", "tokens"), taps={"hidden": frozenset({1})})
    batch = masked()
    assert rows_of_samples(batch, "labels").tolist() == [2, 0, 2]
    assert rows_of_samples(batch, "tokens").tolist() == [5, 3, 4]
    outputs = taught(model, batch, request)
    rows = to_rows(outputs, batch, request, top_k=None, vocabulary=None)
    assert rows["labels.states"].shape == (4, 16)
    head = outputs.lm_head["labels"]
    found = to_outputs(rows.__getitem__, batch, request, top_k=None, head=head, scaling={})
    assert_same(found, outputs, batch, request)
    assert found.lm_head["labels"].bias is not None


def test_a_classifier_has_one_row_an_example():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3, attn_implementation="sdpa")).eval()
    request, batch = replace(NOTHING, sequences=True), masked()
    outputs = taught(model, batch, request)
    rows = to_rows(outputs, batch, request, top_k=None, vocabulary=None)
    assert list(rows) == ["sequences.logits"]
    assert rows_of_samples(batch, "sequences").tolist() == [1, 1, 1]
    found = to_outputs(rows.__getitem__, batch, request, top_k=None, head=None, scaling={})
    assert_same(found, outputs, batch, request)


def test_most_likely_tokens_come_from_the_shared_vocabulary(llama):
    request = replace(NOTHING, positions=("labels",), temperatures=(1.0, 2.0))
    batch = collate(ITEMS, 0).with_label_rows(shift=True)
    outputs = taught(llama, batch, request)
    rows = to_rows(outputs, batch, request, top_k=4, vocabulary=15)
    found = to_outputs(rows.__getitem__, batch, request, top_k=4, head=None, scaling={}).lm_head["labels"]
    head = outputs.lm_head["labels"]
    assert isinstance(head, HeadInputs)
    expected = most_likely((head.rows @ head.weight.T)[:, :15], 4, (1.0, 2.0))
    assert isinstance(found, TopK)
    assert found.tokens.max() < 15
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
