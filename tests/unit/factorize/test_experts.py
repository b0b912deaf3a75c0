"""Experts whose stacked matrices are factorized."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import compress_model, factorize
from llmdistill.factorize.counting import count_parameters, layer_stacks
from llmdistill.factorize.experts import LowRankStack
from llmdistill.factorize.export import merge
from llmdistill.factorize.kinds import Factorization
from llmdistill.factorize.onnx_export import export_onnx
from llmdistill.factorize.reconstruction import by_kind
from llmdistill.factorize.sizes import summarize
from llmdistill.factorize.weigh import weigh
from llmdistill.models.load import load_model

from support import in_memory

IDS = torch.randint(5, 60, (3, 8), generator=torch.Generator().manual_seed(0))
STACKS = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 4},
}


def teacher_of(dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model("qwen3_moe", scale=5.0)
    if dtype == torch.float64:  # which the kernel of transformers' own choice does not take
        model.set_experts_implementation("eager")
    return model.to(dtype)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model(input_ids=IDS).logits


def truncated(matrix: Tensor, rank: int) -> Tensor:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]


def block_by_hand(block: Any, gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """The output of a layer's experts for tokens (T, d), with one token and one expert at a time."""
    rows = []
    for token in x:
        shares = (block.gate.weight @ token).softmax(0, dtype=torch.float32)
        best = shares.topk(2)
        share = (best.values / best.values.sum() if block.gate.norm_topk_prob else best.values).to(token)
        row = torch.zeros_like(token)
        for expert, part in zip(best.indices, share, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            row = row + part * (down[expert] @ (functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("only", [None, "gate_up_proj", "down_proj"])
def test_a_lower_rank_is_a_plain_loop_with_truncated_matrices(only: str | None) -> None:
    teacher = teacher_of(torch.float64)
    sizes = {name: 3 for name in STACKS if only is None or name.endswith(only)}
    student = copy.deepcopy(teacher)
    factorize(student, Factorization(sizes=sizes))
    block, ours = (model.model.layers[1].mlp for model in (teacher, student))
    stacks = [
        torch.stack([truncated(matrix, 3) for matrix in weight]) if only in (None, name) else weight.detach()
        for name, weight in (("gate_up_proj", block.experts.gate_up_proj), ("down_proj", block.experts.down_proj))
    ]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = block_by_hand(block, *stacks, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-10)


def test_the_planner_counts_every_expert() -> None:
    teacher = teacher_of()
    sizes = layer_stacks(teacher)
    assert sizes == dict(zip(STACKS, [(4, (24, 16)), (4, (16, 12))] * 2, strict=True))
    settings = FactorizeConfig(target_params="60%")
    student, summary = compress_model(teacher, settings), summarize(teacher.config, settings)
    rank = summary["rank"]
    larger = compress_model(teacher, FactorizeConfig(rank=rank + 1))
    assert count_parameters(student) <= count_parameters(teacher) * 60 // 100 < count_parameters(larger)
    assert student.model.layers[1].mlp.experts.down_factors.in_factors.shape == (4, rank, 12)
    assert (summary["student_params"], summary["dense"]) == (count_parameters(student), [])


def test_a_student_is_saved_loaded_and_exported_and_its_teacher_stays_as_it_was(tmp_path: Path) -> None:
    teacher = teacher_of()
    whole, implementation = logits_of(teacher), teacher.config._experts_implementation
    student = compress_model(teacher, FactorizeConfig(ranks={"*.gate_up_proj": 3, "*_proj": 4}))
    assert student.config._experts_implementation != implementation
    assert teacher.config._experts_implementation == implementation
    assert torch.equal(logits_of(teacher), whole)

    student.model.layers[0].mlp.experts.down_factors.in_factors.data.mul_(2)  # what training changes
    student.save_pretrained(tmp_path / "once")
    loaded = load_model(tmp_path / "once", dtype=torch.float32)
    before = logits_of(student)
    assert torch.equal(logits_of(loaded), before)
    loaded.save_pretrained(tmp_path / "twice")
    again = load_model(tmp_path / "twice", dtype=torch.float32)
    torch.testing.assert_close(again.state_dict(), student.state_dict(), rtol=0, atol=0)

    merge(student)
    shapes, expected = ({name: each.shape for name, each in m.named_parameters()} for m in (student, teacher))
    assert shapes == expected
    assert student.config._experts_implementation == implementation
    torch.testing.assert_close(logits_of(student), before, rtol=1e-4, atol=1e-5)
    student.save_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), logits_of(student))


def test_each_matrix_counts_in_what_is_lost() -> None:
    teacher, lost = teacher_of(torch.float64), {}
    compress_model(teacher, FactorizeConfig(ranks={"*.down_proj": 3}), lost=lost)
    downs = [weight for layer in teacher.model.layers for weight in layer.mlp.experts.down_proj.detach()]
    squares = sum(float((weight - truncated(weight, 3)).square().sum()) for weight in downs)
    expected = (squares / sum(float(weight.square().sum()) for weight in downs)) ** 0.5
    assert by_kind(lost) == {"down_proj": {"matrices": 8, "lost": pytest.approx(expected)}}


@pytest.mark.parametrize("name", MIXTURES)
def test_full_rank_changes_nothing(name: str) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 12, "num_experts_per_tok": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    teacher = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **MIXTURES[name])).double().eval()
    teacher.set_experts_implementation("eager")
    full = {stack: min(shape) for stack, (_, shape) in layer_stacks(teacher).items()}
    assert len(full) == (0 if name == "gpt_oss" else 2)  # GPT-OSS has biases, and its matrices are transposed
    student = copy.deepcopy(teacher)
    factorize(student, Factorization(sizes=full), sigma="balanced")
    assert sum(isinstance(module, LowRankStack) for module in student.modules()) == len(full)
    torch.testing.assert_close(logits_of(student), logits_of(teacher), rtol=0, atol=1e-5)


def test_what_leaves_the_experts_dense() -> None:
    config = teacher_of().config
    assert set(STACKS) <= set(summarize(config, FactorizeConfig(rank=4, form="pivoted"))["dense"])
    assert set(STACKS) <= set(summarize(config, FactorizeConfig(shapes={"*": "4x4"}), "kronecker")["dense"])
    weighted = FactorizeConfig(target_params="60%", weighting="gradients", allocation="loss")
    with pytest.raises(UserError, match="take allocation uniform"):
        summarize(config, weighted)


def test_a_graph_of_onnx_is_refused(tmp_path: Path) -> None:
    teacher_of().save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match="tokens choose among the experts"):
        export_onnx(tmp_path / "teacher", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_weighted_linears_stand_beside_plain_experts() -> None:
    teacher = teacher_of()
    settings = FactorizeConfig(rank=4, weighting="activations", calibration=CalibrationConfig(data="memory"))
    batch = Batch(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    weighted = weigh(in_memory(teacher, [batch]), settings)
    student = compress_model(teacher, settings, weighted=weighted)
    plain = compress_model(teacher, FactorizeConfig(rank=4))
    assert student.config.quantization_config.modules == plain.config.quantization_config.modules
    found, expected = (each.model.layers[1].state_dict() for each in (student, plain))
    same = {name for name in found if torch.equal(found[name], expected[name])}
    assert {name for name in same if "factors" in name} == {name for name in found if "factors" in name}
    assert "self_attn.q_proj.A.weight" not in same
