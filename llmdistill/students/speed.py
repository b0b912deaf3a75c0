"""Measures whether a student's factors are slower than the dense matrices that they stand for, when it writes a token.

Two small products have half of the multiply-adds of a large one and twice its overhead, so on a small model they can
take longer. Only the products are timed, of one token, with random weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedConfig

from llmdistill.models.families import is_causal
from llmdistill.students.counting import build_reference
from llmdistill.students.modules import FactorizedLinear

_BYTES = 2**26
"""Weights of one shape to go through: more than a cache of the processor, as a model's own weights are."""
_ROUNDS = 7
_MARGIN = 1.15
"""From which ratio on a difference is no noise of the clock."""


@torch.no_grad()
def time_products(config: PreTrainedConfig, device: torch.device | str = "cpu") -> tuple[float, float] | None:
    """Return the seconds that the factorized linears of a student take for one token, and dense ones in their place.

    Of each shape the least time counts; factors and dense matrices run in turns, so that load hits both alike. None for
    a student without factorized linears.
    """
    by_shape: dict[tuple[object, ...], list[FactorizedLinear]] = {}
    for module in build_reference(config).modules():
        if isinstance(module, FactorizedLinear):
            sizes = tuple(tuple(parameter.shape) for parameter in module.parameters())
            by_shape.setdefault((type(module), module.in_features, module.out_features, sizes), []).append(module)
    if not by_shape:
        return None
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    device, own, in_dense = torch.device(device), 0.0, 0.0
    for modules in by_shape.values():
        first = modules[0]
        size = first.in_features * first.out_features * dtype.itemsize
        count = max(1, min(len(modules), -(-_BYTES // size)))
        factors = [_filled(module, dtype, device) for module in modules[:count]]
        with torch.device("meta"):
            bare = [nn.Linear(first.in_features, first.out_features, bias=False) for _ in range(count)]
        dense = [_filled(module, dtype, device) for module in bare]
        x = torch.full((1, 1, first.in_features), 0.1, dtype=dtype, device=device)
        # The first round warms up.
        rounds = [(_run(factors, x) / count, _run(dense, x) / count) for _ in range(_ROUNDS + 1)][1:]
        own += min(seconds for seconds, _ in rounds) * len(modules)
        in_dense += min(seconds for _, seconds in rounds) * len(modules)
    return own, in_dense


def describe_speed(config: PreTrainedConfig, device: torch.device | str = "cpu") -> str | None:
    """Return a few words if a decoder's factors are clearly slower than dense matrices on this machine; else None."""
    times = time_products(config, device) if is_causal(config) else None
    if times is None or times[0] <= _MARGIN * times[1]:
        return None
    own, dense = (1000 * seconds for seconds in times)
    return f"a token takes {own:.2g} ms by factors, {dense:.2g} dense: see export --to dense"


def _filled(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a module of the meta device with numbers in it."""
    buffers = [name for name, _ in module.named_buffers()]
    module = module.to(dtype).to_empty(device=device)
    for parameter in module.parameters():
        parameter.fill_(0.01)  # not what memory holds, as denormal numbers are slow
    for name in buffers:  # the order of pivots
        module.get_buffer(name).copy_(torch.arange(module.get_buffer(name).numel()))
    return module


def _run(modules: Iterable[nn.Module], x: torch.Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for module in modules:
        module(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
