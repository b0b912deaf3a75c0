"""What the package needs of torch's private names.

Tried with torch 2.10 and 2.13; `tests/unit/test_internals.py` says which name is gone.
"""

from __future__ import annotations

from typing import Any

import torch
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


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let torch.compile make one graph for all sizes of a dimension, if it can."""
    torch._dynamo.maybe_mark_dynamic(tensor, dim)
