"""A student of pivoted factors trains in shards and exports like any other."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmdistill.factorize.export import export_dense

from support import largest_difference, weights

pytestmark = pytest.mark.dist

PIVOTED = ("--student.factorize.form", "pivoted", "--student.factorize.embedding_rank", "12")


def test_two_sharded_ranks_equal_one(trained):
    one, two = trained(*PIVOTED), trained(*PIVOTED, ranks=2, ds_config="zero3")
    assert largest_difference(one, two) < 1e-6


def test_the_factors_are_what_is_trained_and_the_order_stays(trained, tmp_path):
    folder = trained(*PIVOTED)
    before, after = load_file(folder / "untrained" / "model.safetensors"), weights(folder)
    name = "model.layers.0.mlp.up_proj"
    assert after[f"{name}.A.weight"].shape == (6, 32)
    assert after[f"{name}.B.weight"].shape == (42, 6)
    assert {key: (each.shape, each.dtype) for key, each in before.items()} == {
        key: (each.shape, each.dtype) for key, each in after.items()
    }
    for key, each in before.items():
        assert torch.equal(each, after[key]) == key.endswith(".order"), key
    assert any(after[f"{name}.order"] != torch.arange(48))
    export_dense(folder / "student", tmp_path / "dense")
    tokens = torch.arange(20)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(at)(tokens).logits for at in (folder / "student", tmp_path / "dense")
    ]
    assert torch.allclose(*logits, atol=1e-5, rtol=0)
