"""The training state of a DeepSpeed engine as named fragments, which do not depend on ranks, ZeRO stage or buckets.

For every trained parameter the state is its weight in the optimizer's precision and what the optimizer keeps of it,
such as Adam's two moments. A rank holds parts of these tensors. Each part is a fragment: the parameter's name, the kind
of state, and where it begins in the flattened parameter. Fragments saved by any number of ranks at any ZeRO stage
therefore restore any other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from llmdistill.internals.deepspeed_names import (
    after_writing,
    before_writing,
    master_weights,
    optimizer_of,
    partition,
    shard,
    stepped_tensors,
)

WEIGHT = "weight"
"""The kind of state that is the weight itself, in the optimizer's precision."""


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A part of one tensor of training state that this rank holds."""

    name: str
    """Name of the parameter in the student."""
    kind: str
    """WEIGHT, or the optimizer's name of a state, such as exp_avg."""
    start: int
    """Index of its first element in the flattened parameter."""
    numel: int
    read: Callable[[], Tensor]
    """Returns its values, (numel,)."""
    write: Callable[[Tensor], object]
    """Replaces its values by a tensor of shape (numel,), from any device."""


def fragments(engine: Any) -> list[Fragment]:
    """Return the fragments of this rank; without ZeRO every rank holds everything."""
    trained = [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    states, parts = optimizer_of(engine).state, list[Fragment]()
    # ZeRO-3: every parameter is split over all ranks.
    if engine.zero_optimization_stage() == 3:
        # The optimizer's names of its states; none before the first step.
        flats = [flat for group in stepped_tensors(engine) for flat in group]
        kinds = {key for flat in flats for key, value in states.get(flat, {}).items() if _is_like(value, flat)}
        for name, parameter in trained:
            start, numel = shard(parameter)
            for kind in (WEIGHT, *sorted(kinds)) if numel > 0 else ():
                read, write = partial(_read_shard, parameter, kind, numel), partial(_write_shard, parameter, kind)
                parts.append(Fragment(name=name, kind=kind, start=start, numel=numel, read=read, write=write))
        return parts
    # ZeRO-1 and 2: a rank has one range of all parameters of a group, laid end to end in one flat tensor.
    if engine.zero_optimization_stage() > 0:
        flats = [flat for (flat,) in stepped_tensors(engine)]
        for name, parameter in trained:
            part = partition(parameter)
            if part is None:  # the whole parameter lies in the ranges of other ranks
                continue
            for kind, values in _state_of(flats[part.group], states).items():
                parts.append(_viewed(name, kind, part.start, values.data.narrow(0, part.place, part.numel)))
        return parts
    # Without ZeRO the optimizer may step fp32 copies of weights in bf16, several in one tensor.
    exact = master_weights(engine)
    for name, parameter in trained:
        stepped, place = exact.get(parameter, (parameter, 0))
        for kind, values in _state_of(stepped, states).items():
            parts.append(_viewed(name, kind, 0, values.data.view(-1).narrow(0, place, parameter.numel())))
    return parts


def counters(engine: Any) -> dict[str, float]:
    """Return the numbers of the optimizer that belong to no element of a parameter, such as Adam's step."""
    numbers: dict[str, float] = {}
    for state in optimizer_of(engine).state.values():
        # Those of all parameters are equal, so one of each name is enough.
        numbers |= {key: float(value) for key, value in state.items() if _is_number(value)}
    return numbers


def set_counters(engine: Any, values: dict[str, float]) -> None:
    """Set the numbers that `counters` returned; the optimizer must have its state."""
    for state in optimizer_of(engine).state.values():
        for key, value in values.items():
            # torch counts steps in a tensor, and the Adam of DeepSpeed for CPUs in an int.
            if isinstance(state.get(key), Tensor):
                state[key].fill_(value)
            elif key in state:
                state[key] = type(state[key])(value)


def create_state(engine: Any) -> None:
    """Let the optimizer create its state by a step that changes no weight: gradients of 0 at a learning rate of 0.

    The optimizer creates it itself, because each implementation of Adam keeps its own types.
    """
    base = optimizer_of(engine)
    before = [dict(group) for group in base.param_groups]
    lent: list[Tensor] = []
    for group, parameters in zip(base.param_groups, stepped_tensors(engine), strict=True):
        group.update(lr=0.0, weight_decay=0.0, params=parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                lent.append(parameter)
            else:
                parameter.grad.zero_()
    # This counts as a step of Adam, until `set_counters` restores its counter.
    base.step()
    for parameter in lent:
        parameter.grad = None
    for group, values in zip(base.param_groups, before, strict=True):
        group.update(values)


@contextmanager
def restoring(engine: Any) -> Iterator[None]:
    """Block in which fragments are written; afterwards the model computes with the restored weights."""
    before_writing(engine)
    yield
    after_writing(engine)


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _state_of(parameter: Tensor, states: Mapping[Any, dict[str, Any]]) -> dict[str, Tensor]:
    """Return what the optimizer has of each element of a tensor that it trains, by kind of state."""
    of_elements = {kind: value for kind, value in states.get(parameter, {}).items() if _is_like(value, parameter)}
    return {WEIGHT: parameter.data} | of_elements


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _viewed(name: str, kind: str, start: int, view: Tensor) -> Fragment:
    numel, data = view.numel(), view.data
    return Fragment(name=name, kind=kind, start=start, numel=numel, read=lambda: data, write=data.copy_)


def _read_shard(parameter: Any, kind: str, numel: int | None = None) -> Tensor:
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    whole = safe_get_local_fp32_param(parameter) if kind == WEIGHT else safe_get_local_optimizer_state(parameter, kind)
    return cast(Tensor, whole[:numel])


def _write_shard(parameter: Any, kind: str, values: Tensor) -> None:
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    # DeepSpeed pads a parameter, so that every rank has an equal share; the setters take the whole share.
    padded = _read_shard(parameter, kind).clone()
    padded[: len(values)] = values.to(padded.device)
    if kind == WEIGHT:
        safe_set_local_fp32_param(parameter, padded)
    else:
        safe_set_local_optimizer_state(parameter, padded, kind)
