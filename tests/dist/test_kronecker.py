"""A decoder of Kronecker products learns by MaKD's terms like any other student, in every stage, and exports."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from llmdistill.factorize.export import export_dense

from support import largest_difference, logged, weights

KRONECKER = (
    *("--student.method", "kronecker", "--student.factorize.rank", "null"),
    *("--student.factorize.shapes", json.dumps({"*.mlp.down_proj": "2x8", "*.mlp.*": "8x2", "*": "8x16"})),
    *("--student.factorize.sums", "2", "--student.factorize.embedding_columns", "4"),
)


@pytest.mark.parametrize("ds_config", ["zero2", "zero3"])
def test_two_ranks_equal_one(trained, ds_config):
    assert largest_difference(trained(*KRONECKER), trained(*KRONECKER, ranks=2, ds_config=ds_config)) < 1e-6


def test_the_factors_are_what_is_trained_and_saved(trained, tmp_path):
    folder = trained(*KRONECKER)
    saved = weights(folder)
    assert saved["model.layers.0.mlp.up_proj.A"].shape == (2, 8, 2)
    assert saved["model.layers.0.mlp.up_proj.B"].shape == (2, 6, 16)
    assert saved["model.embed_tokens.B.weight"].shape == (4,)
    losses = logged(folder, "loss")
    assert losses[-1] < losses[0]
    export_dense(folder / "student", tmp_path / "dense")
    tokens = torch.arange(20)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(at)(tokens).logits for at in (folder / "student", tmp_path / "dense")
    ]
    assert torch.allclose(*logits, atol=1e-5, rtol=0)
