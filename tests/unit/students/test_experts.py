"""Experts whose stacked matrices are factorized."""

import copy

import pytest
import torch
from references import truncated
from tiny import outputs, tiny_model
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.models.load import load_model
from llmdistill.serving.onnx_export import export_onnx
from llmdistill.students.convert import compress_model, factorize
from llmdistill.students.counting import count_parameters, layer_stacks
from llmdistill.students.experts import LowRankStack
from llmdistill.students.kinds import Factorization
from llmdistill.students.merge import merge
from llmdistill.students.reconstruction import by_kind
from llmdistill.students.sizes import summarize
from llmdistill.students.start.weigh import weigh

from support import in_memory

IDS = torch.randint(5, 60, (3, 8), generator=torch.Generator().manual_seed(0))
STACKS = [f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in ("gate_up_proj", "down_proj")]
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 4},
}


def teacher_of(dtype=torch.float32):
    model = tiny_model("qwen3_moe", scale=5.0)
    if dtype == torch.float64:  # which the kernel of transformers' own choice does not take
        model.set_experts_implementation("eager")
    return model.to(dtype)


def block_by_hand(block, gate_up, down, x):
    """The output of a layer's experts for tokens (T, d): of all of them, of which each token takes its best two."""
    shares = (x @ block.gate.weight.T).softmax(-1, dtype=torch.float32)
    shares = shares.masked_fill(shares < shares.topk(2).values[:, 1:], 0)
    shares = shares / shares.sum(-1, keepdim=True) if block.gate.norm_topk_prob else shares
    gate, up = torch.einsum("eoi,ti->teo", gate_up, x).chunk(2, dim=-1)
    return torch.einsum("te,eoi,tei->to", shares.to(x), down, functional.silu(gate) * up)


@pytest.mark.parametrize("only", [None, "gate_up_proj", "down_proj"])
def test_a_lower_rank_is_a_plain_loop_with_truncated_matrices(only):
    teacher = teacher_of(torch.float64)
    student = copy.deepcopy(teacher)
    factorize(student, Factorization(sizes={name: 3 for name in STACKS if only is None or name.endswith(only)}))
    block, ours = (model.model.layers[1].mlp for model in (teacher, student))
    weights = {"gate_up_proj": block.experts.gate_up_proj, "down_proj": block.experts.down_proj}
    stacks = [truncated(each, 3) if only in (None, name) else each for name, each in weights.items()]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = block_by_hand(block, *stacks, x.flatten(0, 1)).view_as(x)
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-10)


def test_the_planner_counts_every_expert():
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


def test_a_student_is_saved_loaded_and_exported_and_its_teacher_stays_as_it_was(tmp_path):
    teacher = teacher_of()
    whole, implementation = outputs(teacher), teacher.config._experts_implementation
    student = compress_model(teacher, FactorizeConfig(ranks={"*.gate_up_proj": 3, "*_proj": 4}))
    assert student.config._experts_implementation != implementation
    assert teacher.config._experts_implementation == implementation
    assert torch.equal(outputs(teacher), whole)

    student.model.layers[0].mlp.experts.down_factors.in_factors.data.mul_(2)  # what training changes
    student.save_pretrained(tmp_path / "student")
    before = outputs(student)
    assert torch.equal(outputs(load_model(tmp_path / "student", dtype=torch.float32)), before)

    merge(student)
    shapes, expected = ({name: each.shape for name, each in m.named_parameters()} for m in (student, teacher))
    assert shapes == expected
    assert student.config._experts_implementation == implementation
    torch.testing.assert_close(outputs(student), before, rtol=1e-4, atol=1e-5)
    student.save_pretrained(tmp_path / "dense")
    torch.testing.assert_close(outputs(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")), outputs(student))


def test_each_matrix_counts_in_what_is_lost():
    teacher, lost = teacher_of(torch.float64), {}
    compress_model(teacher, FactorizeConfig(ranks={"*.down_proj": 3}), lost=lost)
    downs = torch.cat([layer.mlp.experts.down_proj.detach() for layer in teacher.model.layers])
    expected = float((downs - truncated(downs, 3)).norm() / downs.norm())
    assert by_kind(lost) == {"down_proj": {"matrices": 8, "lost": pytest.approx(expected)}}


@pytest.mark.parametrize("name", MIXTURES)
def test_full_rank_changes_nothing(name):
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
    torch.testing.assert_close(outputs(student), outputs(teacher), rtol=0, atol=1e-5)


def test_what_leaves_the_experts_dense_and_what_they_refuse(tmp_path):
    teacher = teacher_of()
    teacher.save_pretrained(tmp_path / "teacher")
    assert set(STACKS) <= set(summarize(teacher.config, FactorizeConfig(rank=4, form="pivoted"))["dense"])
    assert set(STACKS) <= set(summarize(teacher.config, FactorizeConfig(shapes={"*": "4x4"}), "kronecker")["dense"])
    weighted = FactorizeConfig(target_params="60%", weighting="gradients", allocation="loss")
    with pytest.raises(UserError, match="take allocation uniform"):
        summarize(teacher.config, weighted)
    with pytest.raises(UserError, match="tokens choose among the experts"):
        export_onnx(tmp_path / "teacher", tmp_path / "onnx")


def test_weighted_linears_stand_beside_plain_experts():
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
