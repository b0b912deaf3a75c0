from __future__ import annotations

import torch
from tiny import tiny_config
from transformers import BertForPreTraining, BertForQuestionAnswering

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.losses.terms import RunningTerms
from llmdistill.models.forward import TappedModel, visibility_mask
from llmdistill.models.taps import Recorder

BERT = tiny_config("bert")


def test_spans_do_not_depend_on_padding() -> None:
    model = BertForQuestionAnswering(BERT).eval()
    tapped = TappedModel(model, Recorder(model, {}))
    ids = torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    both = tapped(Batch(ids, mask, torch.full_like(ids, IGNORE_INDEX))).sequence_logits
    first = ids[:1, :3]
    alone = tapped(Batch(first, torch.ones_like(first), torch.full_like(first, IGNORE_INDEX))).sequence_logits
    assert both.shape == (2, 2, 5)
    assert torch.allclose(both[:1].softmax(-1)[..., :3], alone.softmax(-1), atol=1e-6)
    assert (both[0, :, 3:] == -torch.inf).all()


def test_a_total_without_terms_on_tokens_reaches_every_parameter() -> None:
    model = BertForPreTraining(BERT)
    ids = torch.tensor([[1, 2, 3]])
    terms = RunningTerms(layer_terms=(), token_terms=(), sequence_terms=(), teacher=None, factors={})
    TappedModel(model, Recorder(model, {})).learn(Batch(ids, torch.ones_like(ids), ids), terms).total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_padding_is_no_key_and_sees_all() -> None:
    """A source of one token with a target of one, padded on the left and on the right."""
    real, visible_until = torch.tensor([[0, 1, 1, 0]]), torch.tensor([[4, 2, 3, 4]])
    seen = visibility_mask(real, visible_until, BERT)
    assert seen.long().tolist() == [[[[1, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]]]]
