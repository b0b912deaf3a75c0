"""Weighted factorization of whole models: the loss that it keeps, exact budgets, passes, heads and folders."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize import measure
from llmdistill.factorize import weigh as module
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.counting import count_parameters, layer_linears
from llmdistill.factorize.cuts import cut_costs
from llmdistill.factorize.sizes import summarize
from llmdistill.factorize.weigh import choose_ranks, measured, weigh
from llmdistill.factorize.weighted import Weighted

from support import in_memory

VOCABULARY = 40


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """A Llama whose layers differ in how much they matter, and whose inputs are far from white."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer, scale in zip(model.model.layers, (2.0, 0.7, 0.1), strict=True):
            layer.mlp.down_proj.weight.mul_(scale)
            layer.input_layernorm.weight.copy_(torch.logspace(-1, 0.5, 32)[torch.randperm(32)])
    return model


def batches(count: int, seed: int, size: int = 8) -> list[Batch]:
    """Short sequences over a part of the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(VOCABULARY // 2, (size, 12), generator=draw)
        names = tuple((1000 * seed + number * size + row,) for row in range(size))
        made.append(Batch(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, sample_ids=names))
    return made


def naive_divergence(student, teacher, seed: int = 9, first: int = 12) -> float:
    """KL(teacher‖student) per token, of the first ones of each row, on data that the calibration did not see."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches(4, seed):
            log_t, log_s = (m(batch.input_ids[:, :first]).logits.log_softmax(-1) for m in (teacher, student))
            total += float((log_t.exp() * (log_t - log_s)).sum())
            tokens += batch.input_ids[:, :first].numel()
    return total / tokens


def settings(**given) -> FactorizeConfig:
    return FactorizeConfig(**given)


WEIGHED: dict[str, Weighted] = {}
"""By settings: several tests look at the same."""
BY_LOSS = {"target_params": "60%", "weighting": "gradients", "allocation": "loss"}


def weighed(model, chosen: FactorizeConfig) -> Weighted:
    if repr(chosen) not in WEIGHED:
        WEIGHED[repr(chosen)] = weigh(in_memory(model, batches(10, 1), batches(4, 9)), chosen)
    return WEIGHED[repr(chosen)]


def student_of(model, chosen: FactorizeConfig):
    weighted = None if chosen.weighting == "none" else weighed(model, chosen)
    return compress_model(model, chosen, weighted=weighted), weighted


def test_each_weighting_keeps_more_of_the_loss_than_the_one_before_it(llama):
    found = {
        "none": student_of(llama, settings(rank=8))[0],
        "activations": student_of(llama, settings(rank=8, weighting="activations"))[0],
        "gradients": student_of(llama, settings(rank=8, weighting="gradients"))[0],
    }
    losses = {name: naive_divergence(student, llama) for name, student in found.items()}
    assert losses["gradients"] < 0.8 * losses["none"]
    assert losses["activations"] < 0.9 * losses["none"]
    params = count_parameters(found["none"])
    target = settings(target_params=params, weighting="gradients", allocation="loss")
    allocated, weighted = student_of(llama, target)
    assert naive_divergence(allocated, llama) < 0.8 * losses["gradients"]
    assert params - 48 - 32 < count_parameters(allocated) <= params, "the budget is spent to less than one rank"
    assert len(set(weighted.ranks.values())) > 3


def test_ranks_follow_what_cuts_were_measured_to_cost(llama):
    chosen = settings(**BY_LOSS)
    data = batches(10, 1)
    factors = measured(in_memory(llama, data), chosen)
    first = choose_ranks(llama.config, chosen, factors)
    measured_costs = cut_costs(llama, factors, data[:8], seed=2**31)  # on 64 examples
    costs = {name: float(measured_costs[name][rank]) for name, rank in first.ranks.items()}
    found = weighed(llama, chosen)
    assert found.ranks != first.ranks
    for name, cost in costs.items():
        assert found.factors[name].costs()[first.ranks[name]] == pytest.approx(cost)


def test_the_better_ranks_on_held_out_data_are_taken(llama, monkeypatch):
    chosen = settings(**BY_LOSS)
    found = weighed(llama, chosen)
    one_rank = settings(target_params="60%", weighting="gradients")
    for name, given in (("loss", chosen), ("uniform", one_rank)):
        assert found.held_out[name] == pytest.approx(naive_divergence(student_of(llama, given)[0], llama), rel=1e-3)
    assert found.held_out["loss"] < found.held_out["uniform"]
    monkeypatch.setattr(measure, "COST_TOKENS", 6)  # a decoder is judged by the first tokens of each row
    first = weigh(in_memory(llama, batches(10, 1), batches(4, 9)), chosen)
    student = compress_model(llama, chosen, weighted=first)
    assert first.held_out["loss"] == pytest.approx(naive_divergence(student, llama, first=6), rel=1e-3)
    # Where the prediction misleads, the single rank is taken.
    monkeypatch.setattr(module, "divergences", lambda *_: {"loss": 2.0, "uniform": 1.0})
    found = weigh(in_memory(llama, batches(4, 1), batches(1, 9)), chosen)
    assert found.ranks == weigh(in_memory(llama, batches(4, 1)), one_rank).ranks


def test_ranks_are_multiples_and_matrices_that_gain_nothing_stay_dense(llama):
    chosen = settings(target_params="85%", weighting="gradients", allocation="loss", rank_multiple=4)
    student, weighted = student_of(llama, chosen)
    assert all(rank % 4 == 0 for rank in weighted.ranks.values())
    assert count_parameters(student) <= int(0.85 * count_parameters(llama))
    before_any_data = summarize(llama.config, chosen)
    assert before_any_data["student_params"] == int(0.85 * count_parameters(llama))
    assert before_any_data["rank"] is None
    sizes = {name.removeprefix("model."): shape for name, shape in layer_linears(llama).items()}
    assert all(rank * sum(sizes[name]) < sizes[name][0] * sizes[name][1] for name, rank in weighted.ranks.items())


def test_too_few_tokens_are_said(llama):
    chosen = settings(rank=8, weighting="gradients")
    assert weigh(in_memory(llama, batches(1, 1, size=4)), chosen).warning() is None
    few = weigh(in_memory(llama, batches(1, 1, size=3)), chosen).warning()
    assert few is not None
    assert few.startswith("the calibration data have 36 tokens, fewer than the 48 columns")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rank": 8, "allocation": "loss"}, "allocation loss spends target_params"),
        ({"target_params": "50%", "allocation": "loss", "weighting": "activations"}, "weighting gradients"),
        ({"rank": 8, "rank_multiple": 0}, "rank_multiple is 0"),
    ],
)
def test_settings_that_contradict_each_other(given, said):
    with pytest.raises(ValueError, match=said):
        settings(**given)


def test_a_target_below_the_smallest_allocation_names_it(llama):
    chosen = settings(target_params="20%", weighting="gradients", allocation="loss", rank_multiple=8)
    smallest = count_parameters(compress_model(llama, settings(rank=8)))
    with pytest.raises(UserError, match=rf"rank 8 for every linear, the smallest allocation, has {smallest:,} param"):
        summarize(llama.config, chosen)


def test_a_weighting_without_data_is_refused(llama):
    with pytest.raises(UserError, match="weighting gradients needs calibration data"):
        compress_model(llama, settings(rank=8, weighting="gradients"))
    with pytest.raises(UserError, match="weighting gradients needs calibration data"):
        compress_model(llama, settings(shapes={"*": "4x4"}, weighting="gradients"), "kronecker")
