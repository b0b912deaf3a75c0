"""Calibration of models whose linears read something else than the tokens of a batch, once, or are changed in place.

Against a plain loop: transformers' own forward pass of each row alone, without padding and without layers that are
computed again, where each linear hands on a copy of what it returns.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from llmdistill.batch import Batch
from llmdistill.config import FactorizeConfig
from llmdistill.models.families import base_name, is_causal
from llmdistill.students.convert import compress_model
from llmdistill.students.counting import layer_linears, layer_stacks
from llmdistill.students.install import matrix
from llmdistill.students.start import sampled
from llmdistill.students.start.cuts import cut, predict_losses
from llmdistill.students.start.moments import measure_moments
from llmdistill.students.start.sampled import Sampling, watch_reads
from llmdistill.students.start.weigh import weigh
from llmdistill.students.start.weighted import WeightedSVD, weighted_svd
from llmdistill.students.start.weighted_factors import WeightedFactors

from support import in_memory

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**SIZES, **TOKENS, "num_key_value_heads": 2, "head_dim": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SHARED = {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 12}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
POSITIONS = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 3, "type_vocab_size": 0}

MODELS: dict[str, dict[str, Any]] = {
    "opt": {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "mistral": {**GROUPED, "sliding_window": 3},
    "gemma": GROUPED,
    "gemma2": {**GROUPED, "sliding_window": 3, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**GROUPED, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo": {**GROUPED, "clip_qkv": 0.5},
    "qwen2_moe": SHARED,
    "qwen3_next": {**SHARED, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
                   "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": {**GROUPED, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1},
    "mamba": {**SIZES, "state_size": 4, "time_step_rank": 4},
    "mamba2": {**SIZES, "state_size": 4, "num_heads": 8, "head_dim": 4, "n_groups": 1},
    "albert": {**SIZES, **TOKENS, "embedding_size": 12, "num_hidden_layers": 3},
    "deberta-v2": {**SIZES, **TOKENS, **POSITIONS, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deberta": {**SIZES, **TOKENS, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0},
    "longformer": {**SIZES, **TOKENS, "attention_window": [4, 4]},
}  # fmt: skip


def tiny(name: str, *, head: bool = True) -> Any:
    config = AutoConfig.for_model(name, **MODELS[name], max_position_embeddings=40)
    torch.manual_seed(0)
    with_head = AutoModelForCausalLM if is_causal(config) else AutoModelForMaskedLM
    model = (with_head if head else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def make_batch(lengths: tuple[int, ...], seed: int = 0) -> Batch:
    ids = torch.randint(3, 40, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    names = tuple((row,) for row in range(len(lengths)))
    return Batch(input_ids=ids * mask, attention_mask=mask, labels=torch.full_like(ids, -100), sample_ids=names)


def calls_of(model: Any, batch: Batch, seed: int = 0) -> list[dict[str, list[tuple[Any, Any]]]]:
    """Of each row and linear the inputs (N, n) and the gradients at the outputs (N, m) of each call, in fp64."""
    rows, names = [], list(layer_linears(model))
    for row, length in enumerate(batch.attention_mask.sum(1).tolist()):
        seen: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}

        def note(name: str, inputs: Any, output: Any, seen: Any = seen) -> Any:
            if output.requires_grad:
                output.retain_grad()
            seen[name].append((inputs[0].detach(), output))
            return output.clone()

        handles = []
        for name in names:
            linear = model.get_submodule(name)
            handles.append(linear.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),)))
            handles.append(linear.register_forward_hook(lambda _, i, o, name=name: note(name, i, o)))
        ids = batch.input_ids[row : row + 1, :length]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        if "logits" in output:
            log_NV = output.logits[0].log_softmax(-1)
            chances_N = sampled.draw_uniform(batch, 1, seed)[row, :length, 0].double()
            drawn_N = (log_NV.detach().double().exp().cumsum(-1) < chances_N[:, None]).sum(-1)
            (-log_NV.gather(1, drawn_N.clamp(max=log_NV.shape[1] - 1)[:, None]).sum()).backward()
        else:
            hidden_NW = output.last_hidden_state[0]
            signs_NW = sampled.draw_uniform(batch, hidden_NW.shape[1], seed)[row, :length].lt(0.5).float() * -2 + 1
            (hidden_NW * signs_NW).sum().backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()

        def flat(each: Any) -> Any:
            return each.double().reshape(-1, each.shape[-1])

        rows.append({
            name: [(flat(x), flat(torch.zeros_like(o) if o.grad is None else o.grad)) for x, o in calls]
            for name, calls in seen.items()
        })  # fmt: skip
    return rows


def check(model: Any, lengths: tuple[int, ...] = (6, 3, 5)) -> None:
    """Compare C, G and predicted losses of cuts."""
    batch = make_batch(lengths)
    names = list(layer_linears(model))
    rows = calls_of(model, batch, 3)
    called = [each for each in names if any(y.any() for row in rows for _, y in row[each])]
    found = measure_moments(model, names, [batch], Sampling(seed=3))
    assert set(found) == set(called)
    factors = {}
    for each in called:
        pairs = [pair for row in rows for pair in row[each]]
        c, g = sum(x.T @ x for x, _ in pairs), sum(y.T @ y for _, y in pairs)
        torch.testing.assert_close(
            found[each].inputs.double(), c, rtol=1e-4, atol=1e-5 * float(c.abs().max()), msg=each
        )
        torch.testing.assert_close(
            found[each].gradients.double(), g, rtol=1e-4, atol=2e-5 * float(g.abs().max()) + 1e-9, msg=each
        )
        weight = matrix(model.get_submodule(each)).detach()
        factors[base_name(model, each)] = weighted_svd(weight, found[each], min(weight.shape))
    assert found[called[0]].tokens == sum(lengths)
    costs = predict_losses(model, factors, [batch], Sampling(seed=3))
    for each, factor in factors.items():
        full = next(one for one in called if base_name(model, one) == each)
        expected = naive_costs(factor, [row[full] for row in rows]) / sum(lengths)
        torch.testing.assert_close(costs[each], expected, rtol=1e-3, atol=1e-5 * float(expected.max()), msg=each)


def naive_costs(factors: WeightedSVD, rows: list[list[tuple[Any, Any]]]) -> Any:
    """Half the square of what each cut, made alone, changes the loss of each row by, to first order."""
    left, values, right = (each.double() for each in (factors.left, factors.values, factors.right))
    costs = []
    for rank in range(len(values) + 1):
        lost = left[:, rank:] * values[rank:] @ right[rank:]
        costs.append(sum(sum(((x @ lost.T) * y).sum() for x, y in calls) ** 2 for calls in rows) / 2)
    return torch.tensor(costs, dtype=torch.float64)


@pytest.mark.parametrize("kept", [10**6, 1], ids=["", "computed again"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_measured_is_that_of_a_loop_over_rows(name, kept, monkeypatch):
    monkeypatch.setattr(sampled, "graph_tokens", lambda _: kept)
    check(tiny(name))


@pytest.mark.parametrize("name", ["albert", "longformer", "mamba"])
def test_models_without_a_head_are_judged_by_their_last_hidden_states(name):
    """Which are not what a layer returns: it may run several times, or on more tokens, or be followed by a norm."""
    check(tiny(name, head=False))


@pytest.mark.parametrize("lengths", [(6,), (6, 4), (4, 6, 6), (3, 1), (5, 5)])
def test_relative_positions_are_no_tokens_however_many_there_are(lengths):
    """There are 6 of them."""
    check(tiny("deberta-v2"), lengths)


def test_only_what_a_batch_cannot_tell_apart_is_run_row_by_row():
    for name in MODELS:
        found = watch_reads(tiny(name), list(layer_linears(tiny(name))), [make_batch((3, 7))])
        assert found.in_order == (name not in ("deberta", "deberta-v2", "longformer")), name
        assert not found.changed


class Routed(nn.Module):
    """Experts that are a list of linears, each for some of the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        chosen = (rows[:, 0] > 0).long() + (rows[:, 1] > 0.5)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            here = (chosen == number).nonzero()[:, 0]
            output = output.index_add(0, here, expert(rows[here]))
        return output.view_as(x)


class Changing(nn.Module):
    """Changes what a linear has read, and what it has returned."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.linears[0](x)
        first.clamp_(-0.5, 0.5)
        second = self.linears[1](first)
        first.mul_(3)
        second /= 2
        return first + second


@pytest.mark.parametrize("kept", [10**6, 1], ids=["", "computed again"])
@pytest.mark.parametrize("kind", [Routed, Changing])
def test_tokens_of_experts_and_changes_in_place(kind, kept, monkeypatch):
    monkeypatch.setattr(sampled, "graph_tokens", lambda _: kept)
    model = tiny("mistral")
    for layer in model.model.layers:
        layer.mlp = kind(16)
    check(model)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_by_loss_and_the_same_student_again(name, tmp_path):
    """Also linears that are never run: they stay dense (Mamba reads one of its weights itself)."""
    model = tiny(name)
    size = {"target_params": "80%", "allocation": "uniform" if layer_stacks(model) else "loss"}
    settings = FactorizeConfig(**size, weighting="gradients")
    batches = [make_batch((6, 3, 5), seed) for seed in range(4)]
    weighted = weigh(in_memory(model, batches, batches[:1]), settings)
    student = compress_model(model, settings, weighted=weighted).eval()
    called = {
        base_name(model, each)
        for each, calls in calls_of(model, batches[0])[0].items()
        if any(y.any() for _, y in calls)
    }
    if layer_stacks(model):
        assert weighted.ranks.keys() <= called
    else:
        assert weighted.factors.keys() == called
    student.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    ids = batches[0].input_ids[:1]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, student(input_ids=ids).logits, rtol=0, atol=1e-5)


def test_the_held_out_check_cuts_plainly_what_the_calibration_lacks():
    """As the student does, whose factors of such a linear are its plain SVD."""
    model = tiny("opt")
    name = base_name(model, next(iter(layer_linears(model))))
    linear = model.base_model.get_submodule(name)
    x = torch.randn(5, linear.in_features)
    with torch.no_grad(), cut(model, WeightedFactors(ranks={name: 3}, factors={}, predicted_loss=0.0)):
        u, s, vh = torch.linalg.svd(linear.weight)
        torch.testing.assert_close(linear(x), x @ (u[:, :3] * s[:3] @ vh[:3]).T + linear.bias, rtol=0, atol=1e-5)
