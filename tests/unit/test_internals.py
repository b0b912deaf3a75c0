"""The private names of torch, transformers, DeepSpeed and parsers that `internals/*_names.py` rely on."""

import importlib
import inspect
import runpy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from llmdistill.internals import deepspeed_names, parser_names, torch_names, transformers_names

from support import ROOT

TRIED = {
    "torch": "internals/torch_names.py was tried with torch 2.10 and 2.13",
    "transformers": "internals/transformers_names.py was tried with transformers 5.23",
    "deepspeed": "internals/deepspeed_names.py was tried with DeepSpeed 0.19.8",
    "parsers": "internals/parser_names.py was tried with jsonargparse 4.49 and 4.53 on Python 3.11",
}


def test_no_other_file_knows_a_private_name():
    house = runpy.run_path(str(ROOT / "scripts" / "make" / "house.py"))
    places = house["private_attributes"]()
    assert len(places) > 20
    assert [each for each in places if not each.startswith("llmdistill/internals/")] == []


def test_parsers_list_their_flags_and_types():
    parser = ArgumentParser()
    hints = {"number": int | None, "names": list[str], "maybe": list[int] | None, "text": list[str] | str}
    added = [parser.add_argument(f"--{name}", type=hint) for name, hint in hints.items()]
    assert hasattr(parser, "_actions"), f"ArgumentParser has no _actions any more; {TRIED['parsers']}"
    assert hasattr(added[0], "_typehint"), f"an action has no _typehint any more; {TRIED['parsers']}"
    of_name = {action.dest: action for action in parser_names.actions(parser)}
    assert of_name.keys() == {"help", *hints}
    assert {name: parser_names.type_of(of_name[name]) for name in hints} == hints
    assert parser_names.type_of(of_name["help"]) is None
    assert [name for name, action in of_name.items() if parser_names.is_list(action)] == ["names", "maybe"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.utils._python_dispatch", "TorchDispatchMode"),
        ("torch.utils._pytree", "tree_iter"),
        ("torch.utils._pytree", "tree_leaves"),
        ("torch.utils._triton", "has_triton"),
        ("torch._dynamo", "maybe_mark_dynamic"),
    ],
)
def test_torch_s_modules_have_the_names(module, name):
    assert hasattr(importlib.import_module(module), name), f"{module} has no {name} any more; {TRIED['torch']}"


@pytest.mark.parametrize(
    "name",
    [
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"),
        "_local_scalar_dense",
    ],
)
def test_torch_has_the_operations(name):
    assert hasattr(torch.ops.aten, name), f"torch.ops.aten has no {name} any more; {TRIED['torch']}"
    function = getattr(torch.ops.aten, name).default
    assert hasattr(function, "_overloadpacket"), f"an operation has no _overloadpacket any more; {TRIED['torch']}"
    assert function._overloadpacket is getattr(torch.ops.aten, name)


def test_a_compiled_module_tells_what_it_wraps():
    linear = nn.Linear(1, 1)
    assert torch_names.uncompiled(torch.compile(linear)) is torch_names.uncompiled(linear) is linear, TRIED["torch"]


def test_tensors_tell_views_and_changes():
    tensor = torch.zeros(2, 2)
    before = torch_names.version_of(tensor)
    assert (torch_names.is_view(tensor), torch_names.is_view(tensor[0])) == (False, True), TRIED["torch"]
    tensor.add_(1)
    assert torch_names.version_of(tensor) > before, TRIED["torch"]


def test_modules_are_copied_without_their_tensors():
    module, said = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)), TRIED["torch"]
    parameters, buffers = torch_names.own_tensors(module[0])
    assert (parameters.keys(), buffers.keys()) == (
        {"weight", "bias"},
        {"running_mean", "running_var", "num_batches_tracked"},
    ), said

    def copied(each):
        return torch_names.copy_module(each, lambda tensor: torch.zeros_like(tensor), copied)

    other = copied(module)
    assert [name for name, _ in other.named_modules()] == [name for name, _ in module.named_modules()], said
    assert other.state_dict().keys() == module.state_dict().keys(), said
    assert other[1].bias is None, said
    assert not any(tensor.any() for tensor in other.state_dict().values()), said
    assert module[1].weight.all(), f"the module itself has changed; {said}"


def test_tensors_are_added_in_place():
    sums = [torch.ones(2), torch.ones(3, dtype=torch.float64)]
    torch_names.add_in_place(sums, [torch.full((2,), 2.0), torch.full((3,), 3.0, dtype=torch.float64)])
    assert [each.tolist() for each in sums] == [[3.0] * 2, [4.0] * 3], TRIED["torch"]


@pytest.fixture(scope="module")
def model():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, **sizes))


def test_transformers_reads_what_is_set(model, tmp_path):
    said, internals = TRIED["transformers"], transformers_names
    assert internals.attention_implementation(model) == "sdpa", said
    internals.set_attention(model, "eager")
    assert internals.attention_implementation(model) == "eager", said
    internals.set_attention(model, "sdpa")
    internals.set_experts(model, "grouped_mm")
    assert model.config._experts_implementation == "grouped_mm", said

    ties = internals.tied_weights(model)
    assert ties == {"lm_head.weight": "model.embed_tokens.weight"}, said
    for given in ({}, ties):
        internals.set_tied_weights(model, given)
        assert model.all_tied_weights_keys == given, said

    linear = nn.Linear(2, 2)
    assert not internals.is_initialized(linear)
    for each in (linear, linear.weight, linear.bias):
        internals.mark_initialized(each)
    before = linear.weight.clone()
    model.add_module("extra", linear)
    model.initialize_weights()
    assert torch.equal(linear.weight, before), f"a marked module is initialized; {said}"
    internals.mark_initialized(linear, False)
    assert not internals.is_initialized(linear)

    internals.leave_out_of_files(model, ["extra.weight", "extra.bias"])
    model.save_pretrained(tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["unexpected_keys"], f"tensors to leave out are saved; {said}"

    assert internals.weight_conversions(SimpleNamespace()) is None
    internals.set_weight_conversions(loaded, ("a",))
    assert internals.weight_conversions(loaded) == ["a"]
    assert "_weight_conversions" in inspect.getsource(importlib.import_module("transformers.core_model_loading")), said

    layer = model.model.layers[0]
    assert isinstance(layer, GradientCheckpointingLayer)
    assert internals.checkpointing_function(layer) is None, said
    model.gradient_checkpointing_enable()
    assert callable(internals.checkpointing_function(layer)), said

    assert internals.model_class(AutoModelForCausalLM, model.config) is type(model), said
    assert internals.is_from_config(GenerationConfig.from_model_config(model.config)), said
    assert not internals.is_from_config(GenerationConfig()), said


def test_deepspeed_links_parameters_to_the_state_of_the_optimizer():
    from deepspeed.utils import mixed_precision_linkage, tensor_fragment

    links = inspect.getsource(mixed_precision_linkage)
    assert "._hp_mapping = " in links, f"DeepSpeed sets no _hp_mapping any more; {TRIED['deepspeed']}"
    fields = tensor_fragment.__dataclass_fields__
    missing = {"lp_fragment_address", "hp_fragment_address", "param_group_index"} - fields.keys()
    assert not missing, f"DeepSpeed's tensor_fragment has no {missing} any more; {TRIED['deepspeed']}"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "deepspeed.runtime.zero.stage3",
            (
                *("fp16_partitioned_groups_flat", "fp32_partitioned_groups_flat", "sub_group_to_group_id"),
                *("def checkpoint_event_prologue", "def checkpoint_event_epilogue"),
            ),
        ),
        ("deepspeed.runtime.zero.stage_1_and_2", ("def update_lp_params",)),
        ("deepspeed.runtime.zero.partition_parameters", ("ds_tensor", "ds_numel", "ds_process_group")),
    ],
)
def test_deepspeed_s_optimizers_have_the_names(module, names):
    source = inspect.getsource(importlib.import_module(module))
    missing = [name for name in names if name not in source]
    assert not missing, f"{module} has no {missing} any more; {TRIED['deepspeed']}"


@pytest.mark.parametrize("wrapper", ["fused_optimizer.FP16_Optimizer", "unfused_optimizer.FP16_UnfusedOptimizer", None])
def test_master_weights_without_zero_are_those_that_the_optimizer_steps(wrapper):
    """DeepSpeed lays them end to end with its fused Adam, and has one for each parameter with torch's."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(torch.float32 if wrapper is None else torch.bfloat16)
    optimizer = torch.optim.AdamW([{"params": group.parameters()} for group in module], weight_decay=0.0)
    if wrapper is not None:
        file, name = wrapper.split(".")
        wrap = getattr(importlib.import_module(f"deepspeed.runtime.fp16.{file}"), name)
        # They ask for a process group, and there is none.
        with mock.patch(f"{wrap.__module__}.CheckOverflow"), mock.patch("deepspeed.comm.get_rank", return_value=0):
            optimizer = wrap(optimizer, low_precision_dtype=torch.bfloat16)
    engine = SimpleNamespace(optimizer=optimizer, module=module, zero_optimization_stage=lambda: 0)
    found = deepspeed_names.master_weights(engine)
    if wrapper is None:
        assert found == {}, "the optimizer steps the parameters themselves"
        return
    said, before = TRIED["deepspeed"], [parameter.detach().clone() for parameter in module.parameters()]
    stepped = [tensor for group in deepspeed_names.stepped_tensors(engine) for tensor in group]
    for number, parameter in enumerate(module.parameters()):
        exact, start = found[parameter]
        assert any(exact is tensor for tensor in stepped), said
        part = exact.data.view(-1)[start : start + parameter.numel()]
        assert torch.equal(part, parameter.float().flatten()), said
        part.fill_(number + 0.5)
    deepspeed_names.after_writing(engine)
    for number, (parameter, old) in enumerate(zip(module.parameters(), before, strict=True)):
        assert torch.equal(parameter, torch.full_like(old, number + 0.5)), said
