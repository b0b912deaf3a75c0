"""Attention of a decoder within the sequences of packed rows, without a mask of tokens x tokens."""

from __future__ import annotations

from inspect import signature
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llmdistill.batch import Sequences

HAS_VARLEN = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch has its flash kernel for sequences of different lengths, with windows and grouped queries (2.12)."""

WIDEST_HEAD = 256
"""The widest heads that the flash kernel takes; their width must be a multiple of 8."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Let each token attend to the tokens of its own sequence up to itself.

    On a GPU that has it, torch's flash kernel for sequences of different lengths takes the whole batch at once.
    Elsewhere, in fp32 and with dropout on the attention, each group of neighboring sequences of one length is a call
    of the stock sdpa function. Both compute only the blocks within the sequences, and neither makes the host wait.

    Args:
        module: the attention module, which knows whether queries share keys.
        query: (B, H, T, D).
        key, value: (B, G, T, D).
        sequences: where the sequences are; padding is a sequence of its own.
        dropout: probability that an attention weight is dropped.
        scaling: factor on query·key before the softmax; D^-0.5 if None.
        sliding_window: the number of tokens that a token sees, itself included; None for all. transformers gives it to
            the attention function of each layer, as its flash attention needs it too.
        kwargs: passed on to the stock sdpa function.

    Returns:
        (B, T, H, D), and None for the attention weights.
    """
    width = query.shape[-1]
    if dropout == 0.0 and width <= WIDEST_HEAD and width % 8 == 0 and has_kernel(query):
        starts, longest = sequences.starts, sequences.longest
        dtype = _kernel_dtype(query)  # sdpa casts by itself under autocast, where rotary embeddings return fp32
        # The rows stand one after the other, so no token is moved.
        output = varlen_attn(
            query.transpose(1, 2).flatten(0, 1).to(dtype),  # (B·T, H, D)
            key.transpose(1, 2).flatten(0, 1).to(dtype),
            value.transpose(1, 2).flatten(0, 1).to(dtype),
            starts,
            starts,
            longest,
            longest,
            scale=scaling,
            # Tokens before and after the token itself; -1 is no limit.
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
        )
        return cast("Tensor", output).unflatten(0, (query.shape[0], query.shape[2])), None
    kwargs |= {"dropout": dropout, "scaling": scaling}
    return _attend_by_sequence(module, query, key, value, sequences, sliding_window, **kwargs), None


def has_kernel(states: Tensor) -> bool:
    """Whether attention is one call for all sequences on the device of a tensor, and in its dtype or autocast's."""
    is_half = _kernel_dtype(states) in (torch.bfloat16, torch.float16)
    return HAS_VARLEN and states.is_cuda and is_half and _is_recent(states.device.index)


def _kernel_dtype(states: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else states.dtype


@torch.compiler.assume_constant_result
def _is_recent(index: int) -> bool:
    # torch's flash kernel needs Ampere (8.0); ROCm devices also answer is_cuda.
    return torch.version.cuda is not None and torch.cuda.get_device_capability(index) >= (8, 0)


@torch.compiler.disable  # a graph would be compiled anew for the lengths of every batch
def _attend_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    window: int | None,
    **kwargs: Any,
) -> Tensor:
    """Attend in one call for each group of neighboring sequences of one length."""
    groups = [(length, len(list(same))) for length, same in groupby(sequences.lengths)]
    sizes = [length * count for length, count in groups]
    # The gradient of a split is one concatenation; that of each slice would be as large as the whole tensor.
    parts = zip(*(states.transpose(1, 2).flatten(0, 1).split(sizes) for states in (query, key, value)), strict=True)
    outputs = []
    for (length, count), part in zip(groups, parts, strict=True):
        # Each part is (count, H or G, length, D).
        query_part, key_part, value_part = (states.unflatten(0, (count, length)).transpose(1, 2) for states in part)
        mask = None
        # No shorter sequence reaches past the window, and without a mask sdpa picks its flash kernel.
        if window is not None and length > window:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < window)
        output, _ = sdpa_attention_forward(module, query_part, key_part, value_part, mask, **kwargs)
        outputs.append(output.flatten(0, 1))  # (count·length, H, D)
    return torch.cat(outputs).unflatten(0, (query.shape[0], query.shape[2]))
