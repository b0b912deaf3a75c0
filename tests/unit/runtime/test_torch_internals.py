"""The names of torch and DeepSpeed that are not public, and that `runtime` relies on."""

import importlib
import inspect

import pytest
import torch

TRIED = {
    "torch": "runtime/torch_internals.py was tried with torch 2.10 and 2.13",
    "deepspeed": "runtime/training_state.py was tried with DeepSpeed 0.19.8",
}


@pytest.mark.parametrize(
    ("module", "name"), [("torch.utils._python_dispatch", "TorchDispatchMode"), ("torch.utils._pytree", "tree_iter")]
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


def test_deepspeed_links_parameters_to_the_state_of_the_optimizer():
    from deepspeed.utils import mixed_precision_linkage, tensor_fragment

    links = inspect.getsource(mixed_precision_linkage)
    assert "._hp_mapping = " in links, f"DeepSpeed sets no _hp_mapping any more; {TRIED['deepspeed']}"
    fields = tensor_fragment.__dataclass_fields__
    missing = {"lp_fragment_address", "hp_fragment_address", "param_group_index"} - fields.keys()
    assert not missing, f"DeepSpeed's tensor_fragment has no {missing} any more; {TRIED['deepspeed']}"
