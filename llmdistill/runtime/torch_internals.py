"""What the tracing and the search for the first value that is not finite need of torch's private names.

Tried with torch 2.10 and 2.13; `tests/unit/runtime/test_torch_internals.py` says which name is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["TorchDispatchMode", "tree_iter"]

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
