"""A student of pivoted factors trains, resumes, takes adapters and exports like any other, in every stage."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmdistill.factorize.export import export_dense

from support import interrupted_copy, largest_difference, logged, weights

pytestmark = pytest.mark.dist

PIVOTED = ("--student.factorize.form", "pivoted")


@pytest.mark.parametrize(("ds_config", "more"), [("zero3", ()), ("zero2", ("--student.lora.rank", "4"))])
def test_two_ranks_equal_one(trained, ds_config, more):
    one, two = trained(*PIVOTED, *more), trained(*PIVOTED, *more, ranks=2, ds_config=ds_config)
    assert largest_difference(one, two) < 1e-6
    losses = logged(one, "loss")
    assert losses[-1] < losses[0]


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


def test_two_ranks_of_zero3_resume_bit_equal(trained, launch, settings, tmp_path):
    whole = trained(*PIVOTED, ranks=2, ds_config="zero3")
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "ds_configs/zero3.json", "--output_dir", str(folder), *PIVOTED, ranks=2)
    assert largest_difference(whole, folder) == 0
