"""What the package needs of torch's private names.

Tried with torch 2.10 and 2.13; `tests/unit/test_internals.py` says which name is gone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves
from torch.utils._triton import has_triton

__all__ = ["TorchDispatchMode", "has_triton", "tree_iter", "tree_leaves"]

FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention
FLASH_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
EFFICIENT_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
"""The kernels of attention on a GPU, without a mask and with one."""
READ_SCALAR = torch.ops.aten._local_scalar_dense.default
"""Reads the value of a tensor of one element on the host."""


def operation_of(function: Any) -> Any:
    """Return the operation of which a function is the variant for some types of arguments."""
    return function._overloadpacket


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another one for autograd."""
    return tensor._is_view()


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change of a tensor in place."""
    return int(tensor._version)


def uncompiled(model: Any) -> Any:
    """Return the module that torch.compile has wrapped, or the same object if it is another one."""
    return getattr(model, "_orig_mod", model)


def own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and the buffers that a module itself has, by name; a change of these dicts changes it."""
    return module._parameters, module._buffers


def copy_module(module: nn.Module, tensor: Callable[[Any], Any], child: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a copy of a module with its hooks; `tensor` and `child` make its parameters, buffers and modules."""
    copied = copy.copy(module)
    for name, make in (("_parameters", tensor), ("_buffers", tensor), ("_modules", child)):
        own = {key: None if tensor is None else make(tensor) for key, tensor in vars(module)[name].items()}
        vars(copied)[name] = own
    return copied


def add_in_place(sums: list[torch.Tensor], addends: list[torch.Tensor]) -> None:
    """Add a tensor to each of several ones in place; a GPU does them all in a few launches."""
    torch._foreach_add_(sums, addends)


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let torch.compile make one graph for all sizes of a dimension, if it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
