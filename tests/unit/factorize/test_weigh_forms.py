"""Weighted students in other forms: low-rank token embeddings, tied and untied, and Kronecker products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.calibration_folder import KeptFactors
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.weigh import weigh

from support import in_memory

VOCABULARY = 60


def llama(*, tied: bool = True) -> LlamaForCausalLM:
    """A Llama whose inputs are far from white."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.copy_(torch.logspace(-1, 0.5, 32)[torch.randperm(32)])
        model.model.norm.weight.copy_(torch.logspace(-1, 0.3, 32)[torch.randperm(32)])
    return model


def batches(count: int, seed: int) -> list[Batch]:
    """Sequences in which some tokens are frequent and most are rare."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = (VOCABULARY * torch.rand(8, 12, generator=draw) ** 3).long()
        names = tuple((1000 * seed + number * 8 + row,) for row in range(8))
        made.append(Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, sample_ids=names))
    return made


def naive_divergence(student, teacher) -> float:
    """KL(teacher‖student) per token on data that the calibration did not see."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches(4, 9):
            log_t, log_s = (m(input_ids=batch.input_ids).logits.log_softmax(-1) for m in (teacher, student))
            total += float((log_t.exp() * (log_t - log_s)).sum())
            tokens += batch.input_ids.numel()
    return total / tokens


def student_of(model, method: str = "svd", **given):
    chosen = FactorizeConfig(**given)
    weighted = None if chosen.weighting == "none" else weigh(in_memory(model, batches(8, 1)), chosen, method)
    return compress_model(model, chosen, method, weighted=weighted)


@pytest.mark.parametrize("tied", [True, False])
def test_a_weighted_embedding_keeps_more_of_the_loss(tied: bool, tmp_path: Path) -> None:
    model = llama(tied=tied)
    plain, activations, gradients = (
        student_of(model, embedding_rank=16, weighting=weighting) for weighting in ("none", "activations", "gradients")
    )
    assert count_parameters(plain) == count_parameters(gradients) < count_parameters(model)
    assert naive_divergence(activations, model) < 0.9 * naive_divergence(plain, model)
    assert naive_divergence(gradients, model) < 0.7 * naive_divergence(plain, model)
    gradients.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = batches(1, 5)[0].input_ids
    assert torch.equal(again(input_ids=ids).logits, gradients(input_ids=ids).logits)


def test_layers_and_embedding_are_weighted_together() -> None:
    model = llama()
    size = {"target_params": "55%", "embedding_rank": 24}
    chosen = FactorizeConfig(
        **size, weighting="gradients", allocation="loss", calibration=CalibrationConfig(held_out=1)
    )
    found = weigh(in_memory(model, batches(8, 1), batches(2, 4)), chosen)
    assert set(found.others) == {"embed_tokens"}
    (table,) = found.others.values()
    of_linears = sum(each.costs()[found.ranks[name]] for name, each in found.factors.items() if name in found.ranks)
    assert found.predicted_loss == pytest.approx(of_linears + table.cost)
    student = compress_model(model, chosen, weighted=found)
    assert naive_divergence(student, model) < 0.7 * naive_divergence(student_of(model, **size), model)


def test_weighted_kronecker_products_keep_more_of_the_loss() -> None:
    model = llama()
    size = {"shapes": {"*": "8x8"}, "sums": 8}
    plain, activations, gradients = (
        student_of(model, "kronecker", **size, weighting=weighting)
        for weighting in ("none", "activations", "gradients")
    )
    assert count_parameters(plain) == count_parameters(gradients) < count_parameters(model)
    for student in (activations, gradients):
        assert naive_divergence(student, model) < 0.7 * naive_divergence(plain, model)


def test_what_kronecker_cannot_use_is_refused_before_any_work(tmp_path: Path) -> None:
    def read() -> None:
        raise AssertionError("the data are read")

    source = in_memory(llama(), batches(1, 1))
    object.__setattr__(source, "batches", read)
    for given, said in (
        ({"target_params": "50%"}, "target_params 50% with the method kronecker needs the weights"),
        ({"shapes": {"*": "7x8"}}, "does not divide"),
        ({"shapes": {"*": "8x8"}, "rank_multiple": 8}, "rank_multiple is a setting of the method svd"),
    ):
        with pytest.raises(UserError, match=said):
            weigh(source, FactorizeConfig(weighting="gradients", **given), "kronecker")
    object.__setattr__(source, "kept", lambda: KeptFactors(tmp_path, {}))
    with pytest.raises(UserError, match=r"calibration\.folder keeps factors of the method svd"):
        weigh(source, FactorizeConfig(weighting="gradients", shapes={"*": "8x8"}), "kronecker")
