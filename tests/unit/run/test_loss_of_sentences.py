"""The loss on embeddings of sentences for somebody's own loop, against a loop over pooled outputs."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch.nn import functional
from transformers import BertConfig, BertModel

from llmdistill import DistillationLoss, UserError

VOCABULARY = 50


def test_embeddings_of_sentences_are_those_of_a_loop(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(hidden_size=16, **sizes)).save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"x.{path[2:] or 'Transformer'}"} for path in ("", "1_Pooling")])
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    teacher = BertModel.from_pretrained(tmp_path).eval()
    student = copy.deepcopy(teacher).eval()
    with torch.no_grad():
        student.encoder.layer[1].output.dense.weight *= 0.5
    ids = torch.randint(3, VOCABULARY, (6, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    places = {"labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    for given, take in (
        ({}, lambda hidden, mask: (hidden * mask).sum(1) / mask.sum(1)),
        ({"pooling": "cls"}, first_token),
    ):
        loss = DistillationLoss(teacher, student, method="embedding", mse=0.5, margin=2.0, **given)
        result = loss({**batch, **places})
        theirs, ours = (
            take(model(**batch).last_hidden_state, mask[:, :, None].float()) for model in (teacher, student)
        )
        cosine = (1 - functional.cosine_similarity(ours, theirs)).mean()
        mse = (ours - theirs).square().mean()
        margins = [each[0::3] * (each[1::3] - each[2::3]) for each in (ours, theirs)]
        margin = (margins[0].sum(1) - margins[1].sum(1)).square().mean()
        torch.testing.assert_close(result.loss, cosine + 0.5 * mse + 2 * margin)
        gradients = torch.autograd.grad(result.loss, student.encoder.layer[1].output.dense.weight)
        expected = torch.autograd.grad(cosine + 0.5 * mse + 2 * margin, student.encoder.layer[1].output.dense.weight)
        torch.testing.assert_close(gradients, expected)
        assert loss(batch).terms["margin"] == 0  # without triples
        loss.remove()
    with pytest.raises(UserError, match="pooling: 'middle' does not fit"):
        DistillationLoss(teacher, student, method="embedding", pooling="middle")


def first_token(hidden, _mask):
    return hidden[:, 0]
