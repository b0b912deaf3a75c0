"""Cuts tried on the loaded model, against the students themselves and transformers' own forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import tiny_config, tiny_model
from transformers import AutoModel

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.counting import layer_linears
from llmdistill.factorize.cuts import cut, cut_costs, divergences
from llmdistill.factorize.export import merge
from llmdistill.factorize.weigh import weigh
from llmdistill.models.families import base_name

from support import in_memory

SETTINGS = {"vocab_size": 20, "initializer_range": 0.3}
MODELS = {
    "llama": lambda: tiny_model("llama", **SETTINGS),
    "gpt2": lambda: tiny_model("gpt2", **SETTINGS),
    "bert": lambda: AutoModel.from_config(tiny_config("bert", **SETTINGS)),
    "classes": lambda: tiny_model("bert", head="sequence", num_labels=3, **SETTINGS),
    "score": lambda: tiny_model("bert", head="sequence", num_labels=1, **SETTINGS),
}


def make_batch(seed: int = 0, lengths=(7, 4, 6, 7)) -> Batch:
    ids = torch.randint(1, 20, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    names = tuple((row,) for row in range(len(lengths)))
    return Batch(input_ids=ids * mask, attention_mask=mask, labels=torch.full_like(ids, -100), sample_ids=names)


def prepared(kind: str):
    """A model with biases that are not zero, its weighted factorization, and the student made with it."""
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    settings = FactorizeConfig(rank=3, weighting="gradients")
    weighted = weigh(in_memory(model, [make_batch(1), make_batch(2)]), settings)
    return model, weighted, compress_model(model, settings, weighted=weighted).eval()


def outputs(model, batch: Batch) -> torch.Tensor:
    return model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)[0]


def rows_of(batches) -> list[torch.Tensor]:
    """The ids of each row (1, T), without its padding."""
    pairs = [pair for batch in batches for pair in zip(batch.input_ids, batch.attention_mask, strict=True)]
    return [ids[None, : int(mask.sum())] for ids, mask in pairs]


@torch.no_grad()
def naive(student, model, batches) -> float:
    """Divergence row by row."""
    total, count = 0.0, 0
    for ids in rows_of(batches):
        found = [each(input_ids=ids) for each in (model, student)]
        is_hidden = "last_hidden_state" in found[0]
        t, s = ((each.last_hidden_state if is_hidden else each.logits).flatten(0, -2).double() for each in found)
        count += len(t)
        if is_hidden or t.shape[1] == 1:
            total += float((t - s).square().sum() / 2)
        else:
            p = t.softmax(-1)
            total += float((p * (p.log() - s.log_softmax(-1))).sum())
    return total / count


@pytest.mark.parametrize("kind", MODELS)
def test_a_cut_model_is_the_student(kind):
    model, weighted, student = prepared(kind)
    before, batch = copy.deepcopy(model.state_dict()), make_batch()
    with torch.no_grad():
        whole = outputs(model, batch)
        with cut(model, weighted):
            inside = outputs(model, batch)
        torch.testing.assert_close(inside, outputs(student, batch), rtol=1e-3, atol=1e-4)
        assert not torch.allclose(inside, whole, rtol=1e-2, atol=1e-2)
        assert torch.equal(outputs(model, batch), whole)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    found = divergences(model, {"this": weighted, "none": weighted.with_ranks({})}, [batch, make_batch(3, (5, 2))])
    assert found["this"] == pytest.approx(naive(student, model, [batch, make_batch(3, (5, 2))]), rel=1e-3)
    assert found["none"] == pytest.approx(0, abs=1e-6)
    assert not any(each._forward_hooks for each in model.modules())


def naive_costs(student, model, batches) -> dict[str, float]:
    """Each cut alone in fp64: half the squared change of a score, or the Fisher norm of the change of logits."""
    exact, dense = (copy.deepcopy(each).double() for each in (student, model))
    merge(exact)
    dense.set_attn_implementation("eager")  # sdpa has no forward-mode derivative
    weights, changed = dict(dense.named_parameters()), dict(exact.named_parameters())
    costs = {}
    for name in layer_linears(dense):
        key = f"{name}.weight"
        zero = {each: torch.zeros_like(value) for each, value in weights.items()}
        total = 0.0
        for ids in rows_of(batches):

            def logits(values, ids=ids):
                return torch.func.functional_call(dense, values, (ids,)).logits

            direction = {**zero, key: changed[key] - weights[key]}
            found, change = torch.func.jvp(logits, (weights,), (direction,))
            if found.shape[-1] == 1:
                total += float(change.detach().square().sum() / 2)
            else:
                p, change = found.detach().softmax(-1), change.detach()
                total += float(((p * change.square()).sum(-1) - (p * change).sum(-1).square()).sum() / 2)
        costs[base_name(dense, name)] = total / sum(ids.shape[1] for ids in rows_of(batches))
    return costs


def whole_factors(model):
    """All factors of each matrix, whose leading three are those of `prepared`."""
    shapes = {f"*{base_name(model, name)}": min(shape) for name, shape in layer_linears(model).items()}
    settings = FactorizeConfig(ranks=shapes, weighting="gradients")
    return weigh(in_memory(model, [make_batch(1), make_batch(2)]), settings).factors


def at_rank(costs, rank: int) -> dict[str, float]:
    return {name: float(each[rank]) for name, each in costs.items()}


def test_the_costs_of_cuts_are_those_of_each_cut_alone():
    model, _, student = prepared("score")
    batches = [make_batch(), make_batch(3, (5, 2))]
    factors = whole_factors(model)
    found = cut_costs(model, factors, batches)
    expected = naive_costs(student, model, batches)
    assert at_rank(found, 3) == {name: pytest.approx(cost, rel=1e-3, abs=1e-9) for name, cost in expected.items()}
    assert set(at_rank(found, -1).values()) == {0.0}, "the full rank loses nothing"
    # Two ranks sum their shares; here the other rank has the same data twice as often.
    again = cut_costs(model, factors, batches, reduce=lambda sums: sums.mul_(3))
    assert at_rank(again, 3) == pytest.approx(at_rank(found, 3))
    assert not any(each._forward_hooks for each in model.modules())


def test_the_costs_of_cuts_average_over_sampled_labels():
    model, _, student = prepared("llama")
    factors = whole_factors(model)
    batch, count = make_batch(), 200
    ids, mask, labels = (each.repeat(count, 1) for each in (batch.input_ids, batch.attention_mask, batch.labels))
    often = Batch(ids, mask, labels, sample_ids=tuple((row,) for row in range(len(ids))))  # each has labels of its own
    found = at_rank(cut_costs(model, factors, [often]), 3)
    for name, expected in naive_costs(student, model, [batch]).items():
        assert found[name] == pytest.approx(expected, rel=0.3), name


def test_corrected_factors_cost_what_was_measured():
    _, weighted, _ = prepared("llama")
    name = next(iter(weighted.ranks))
    corrected = weighted.corrected({each: 0.5 for each in weighted.ranks})
    assert corrected.factors[name].costs()[3] == pytest.approx(0.5)
    assert corrected.predicted_loss == pytest.approx(0.5 * len(weighted.ranks))
    before, after = (each.factors[name].costs() for each in (weighted, corrected))
    assert after[1] / after[3] == pytest.approx(before[1] / before[3])
