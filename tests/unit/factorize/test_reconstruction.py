"""What compress says of the matrices, against the singular values that a rank leaves out and the merged student."""

from __future__ import annotations

import re

import pytest
import torch
from tiny import tiny_model

from llmdistill.config import FactorizeConfig
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.export import merge
from llmdistill.factorize.install import matrix
from llmdistill.factorize.reconstruction import as_lines, by_kind


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_loss_of_a_kind_is_what_the_singular_values_beyond_the_rank_hold(kind):
    model, lost = tiny_model(kind), {}
    student = compress_model(model, FactorizeConfig(ranks={"*": 3}), lost=lost)
    names = list(student.config.quantization_config.modules)
    found = by_kind(lost)
    assert found.keys() == {name.rsplit(".", 1)[-1] for name in names}
    for kind, each in found.items():
        weights = [model.base_model.get_submodule(name).weight.detach() for name in names if name.endswith(f".{kind}")]
        values = [torch.linalg.svdvals(weight.double()).square() for weight in weights]
        expected = (sum(v[3:].sum() for v in values) / sum(v.sum() for v in values)).sqrt()
        assert each["matrices"] == len(weights)
        assert each["lost"] == pytest.approx(float(expected), rel=1e-4)
    _, first, *others = as_lines(found).splitlines()
    most = max(found, key=lambda kind: found[kind]["lost"])
    assert len(others) == len(found) - 1
    assert re.fullmatch(rf"\s*{most}\s.*{found[most]['lost']:.1%} of their norm", first)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("method", ["pivoted", "kronecker"])
def test_the_loss_is_that_of_the_matrices_which_the_student_has(kind, method):
    shaped = {"shapes": {"*": "4x4"}, "sums": 2}
    settings = FactorizeConfig(**(shaped if method == "kronecker" else {"ranks": {"*": 3}, "form": "pivoted"}))
    # In a dtype that rounds the factors, which the loss must not overlook.
    model, lost = tiny_model(kind).bfloat16(), {}
    student = compress_model(model, settings, "kronecker" if method == "kronecker" else "svd", lost=lost)
    merge(student.float())
    assert lost
    for name, (left_out, whole) in lost.items():
        ours, theirs = (matrix(each.base_model.get_submodule(name)).float() for each in (student, model))
        assert left_out == pytest.approx(float((ours - theirs).detach().square().sum()), rel=1e-3)
        assert whole == pytest.approx(float(theirs.detach().square().sum()), rel=1e-3)
